"""The same sweep from the cost model, without running it; and the model held against what was measured. No torch."""
