"""What is known of a trained drafter: card.json for programs, README.md for people, beside its weights."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.distill.acceptance import Acceptance, pooled
from specbench.distill.modules import DraftModelModule
from specbench.distill.schema import Distillation
from specbench.distill.train import Outcome, final_tensors, text_settings
from specbench.engine.heads.load import write_head
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.loader import SHARED_EMBEDDINGS
from specbench.engine.models.sources import CONFIG_FILE, SINGLE_FILE, read_json_object
from specbench.roofline.shapes import ModelSpec

CARD, README = "card.json", "README.md"
LAYOUTS = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp-speculators", "medusa": "medusa"}


def write_drafter(folder: Path, outcome: Outcome) -> int:
    """Write config.json and model.safetensors in bf16; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, spec = final_tensors(outcome.drafter), outcome.drafter.spec
    if isinstance(spec, HeadSpec):
        write_head(folder, spec, tensors, layout=LAYOUTS[spec.kind])
    else:
        write_draft_model(folder, spec, tensors)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_draft_model(folder: Path, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """A Llama folder without an embedding: the config says that the target's is shared."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": spec.family,
        SHARED_EMBEDDINGS: "target",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": True,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / SINGLE_FILE, {"format": "pt"})


def card_of(asked: Distillation, outcome: Outcome, target_label: str, command: str, num_bytes: int) -> dict[str, Any]:
    """Everything a reader needs to judge and to repeat the training."""
    corpus, drafter, state = outcome.corpus, outcome.drafter, outcome.trainer.progress
    tensors = drafter.module.tensors
    return {
        "drafter": asked.head.kind,
        "target": target_label,
        "command": command,
        "distillation": asked.model_dump(mode="json"),
        "text": {
            "self_generated": True,
            "settings": {"target": target_label, "seed": text_settings(asked).seed},
            "shards": corpus.num_shards,
            "train_conversations": len(corpus.train),
            "train_answer_tokens": corpus.answer_tokens,
            "held_out_conversations": len(corpus.held_out),
            "benchmark_prompts_among_them": 0,
        },
        "draft_vocabulary": {
            "size": len(drafter.draft_ids) if not isinstance(drafter.module, DraftModelModule) else None,
            "loss_size": len(drafter.draft_ids),
            "held_out_coverage": round(corpus.coverage(drafter.draft_ids), 5),
        },
        "training": {
            "steps": state.step,
            "answer_tokens_read": state.tokens,
            "minutes": round(state.seconds / 60, 2),
            "tokens_per_s": round(state.tokens / max(state.seconds, 1e-9), 1),
            "last_loss": [round(value, 4) for value in state.loss],
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, torch {torch.__version__}",
        },
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "weight_file_bytes": num_bytes,
        "held_out": {
            "drafts": pooled(outcome.acceptance).reached[0],
            "before_training": acceptance_row(outcome.first_acceptance),
            "all": acceptance_row(pooled(outcome.acceptance)),
            "by_temperature_of_the_text": {f"{t:g}": acceptance_row(a) for t, a in outcome.acceptance.items()},
        },
        "builtin_prompts_by_category": None,
    }


def acceptance_row(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "accepted_up_to_position": [round(value, 4) for value in acceptance.by_position],
        "accepted_at_position_given_the_ones_before": [round(value, 4) for value in acceptance.conditional],
        "accepted_tokens_of_a_draft": round(acceptance.mean_accepted, 4),
    }


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """card.json, and README.md made of it."""
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / README).write_text(card_text(card), encoding="utf-8")


def set_categories(folder: Path, acceptance: Mapping[str, Sequence[float]]) -> None:
    """Add to a card what a drafter's acceptance by position is on the built-in prompts, category by category."""
    card = read_json_object(folder / CARD)
    card["builtin_prompts_by_category"] = {name: [round(v, 4) for v in acceptance[name]] for name in sorted(acceptance)}
    write_card(folder, card)


def card_text(card: Mapping[str, Any]) -> str:
    """The card as a page."""
    text, training, held_out = card["text"], card["training"], card["held_out"]
    vocabulary = card["draft_vocabulary"]
    rows = [("before training", held_out["before_training"]), ("held-out prompts", held_out["all"])]
    rows += [(f"... text written at T {t}", row) for t, row in held_out["by_temperature_of_the_text"].items()]
    depth = len(held_out["all"]["accepted_up_to_position"])
    size, covers = vocabulary["size"], 100 * vocabulary["held_out_coverage"]
    words = f"Draft vocabulary: {size:,} tokens" if size else f"Trained on {vocabulary['loss_size']:,} tokens"
    about_text = (
        f"Trained on text that the target wrote itself, prompts too: {text['train_conversations']:,} conversations, "
        f"{text['train_answer_tokens']:,} answer tokens; {text['held_out_conversations']:,} more held out by prompt. "
        "None of the prompts is a built-in benchmark prompt."
    )
    about_training = (
        f"{training['steps']:,} steps, {training['answer_tokens_read']:,} tokens read, {training['minutes']:g} minutes "
        f"on {training['threads']} CPU threads."
    )
    lines = [
        f"# {card['drafter']} for {card['target']}",
        "",
        f"{card['parameters']:,} parameters, {card['weight_file_bytes']:,} bytes in bf16.",
        f"{words}, {covers:.1f} % of the held-out answers.",
        "",
        about_text,
        about_training,
        "",
        f"    {card['command']}",
        "",
        "Share of drafts accepted up to each position (greedy drafts, the target's greedy choice):",
        "",
        "| | " + " | ".join(f"{i + 1}" for i in range(depth)) + " | tokens of a draft |",
        "|---|" + "---|" * (depth + 1),
    ]
    for name, row in rows:
        values = " | ".join(f"{value:.3f}" for value in row["accepted_up_to_position"])
        lines.append(f"| {name} | {values} | {row['accepted_tokens_of_a_draft']:.2f} |")
    categories = card["builtin_prompts_by_category"]
    if categories:
        lines += [
            "",
            "On the built-in prompts, greedy: share accepted at each position of those whose predecessors were:",
            "",
        ]
        deepest = max(len(values) for values in categories.values())
        lines += ["| category | " + " | ".join(f"{i + 1}" for i in range(deepest)) + " |", "|---|" + "---|" * deepest]
        for name, values in categories.items():
            cells = [f"{value:.3f}" for value in values] + ["–"] * (deepest - len(values))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
