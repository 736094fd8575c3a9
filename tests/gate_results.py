"""Results of the gate made by hand, for its renderings; `python tests/gate_results.py` writes the golden files anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from specbench.errors import ExitCode
from specbench.gate.types import VERDICTS, CaseVerdict, GateResult

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "a|b\\|c`d`*e*_f_~g~[h](javascript:x)<i>",
    "@everyone fixes #1, see https://example.org and www.example.org",
    "]]> & &amp; \" ' <!-- -->",
    "evil\u202etxt.exe\u2066x\u2069 \u200b\u200f\u061c\ufeff",
    "nul\x00bell\x07esc\x1b[31mred\x1b[0m\x7f\x85 end",
    "line\nbreak\r\nand\ttab\u2028separator",
    "lone \ud800 surrogate \udfff and \ufffe \uffff",
    "$(x) `${{ github.token }}` ::error::x",
    "",
    "é ñ 漢字 🙂 \U0010ffff",
)


def verdict(name: str = "ngram(3) · depth 4 · batch 2 · T 0", metric: str = "speedup", **changes: Any) -> CaseVerdict:
    fields: dict[str, Any] = {
        "case_hash": "0123456789abcdef", "case_name": name, "metric": metric, "direction": "up", "verdict": "PASS",
        "reason": "no change that counts", "baseline": 1.25, "candidate": 1.26, "ratio": 1.008, "low": 0.99,
        "high": 1.026, "min_effect": 0.05, "p_value": 0.62, "q_value": 0.8,
    }  # fmt: skip
    return CaseVerdict(**fields | changes)


def result(*verdicts: CaseVerdict, **changes: Any) -> GateResult:
    fields: dict[str, Any] = {
        "verdicts": verdicts,
        "fingerprint_baseline": "89945f791d1a4ab2",
        "fingerprint_candidate": "89945f791d1a4ab2",
        "policy": {"name": "default", "confidence": 0.9998, "metrics": {"speedup": {"min_effect": 0.05}}},
        "exit_code": ExitCode.DONE,
        "reasons": ("2 comparisons, none worse than the policy allows",),
        "armed": None,
        "compared": len(verdicts),
        "notes": (),
        "scenario": "quickstart",
        "candidate_dir": "runs/quickstart",
        "baseline_dir": "results/baselines/quickstart-89945f791d1a4ab2.jsonl, entry 2 of 2026-01-31",
    }
    return GateResult(**fields | changes)


def sample() -> GateResult:
    """One of each verdict, as a real gate would put them."""
    name = "ngram(3) · depth {} · batch {} · T 0"
    whole: dict[str, Any] = dict.fromkeys(("baseline", "candidate", "ratio", "low", "high", "p_value", "q_value"))
    return result(
        verdict(
            name.format(4, 2), verdict="REGRESSION", baseline=1.252, candidate=1.151, ratio=0.919, low=0.901,
            high=0.938, p_value=1.2e-9, q_value=5.8e-8, severity=1.65,
            reason="8.1 % slower, at least 6.2 %; both halves of the blocks agree",
        ),
        verdict(
            name.format(4, 2), "output_tokens_per_s", verdict="REGRESSION", baseline=68.11, candidate=61.0,
            ratio=0.8956, low=0.88, high=0.911, p_value=1e-9, q_value=5e-8, severity=2.15, flags=("drift",),
            reason="against the pinned baseline, entry 1 of 2025-12-01: 10.4 % slower, at least 8.9 %",
        ),
        verdict(name.format(8, 2), "case", verdict="INVALID", direction="both",
                reason="the candidate's cell is invalid: token 17 differs", **whole),
        verdict("oracle · depth 4 · batch 16 · T 0", "case", verdict="MISSING", reason="not in the candidate",
                direction="both", **whole),
        verdict(
            name.format(2, 1), verdict="INCONCLUSIVE", ratio=0.973, low=0.91, high=1.04, p_value=0.08, q_value=0.4,
            blocks_needed=7, flags=("underpowered",), reason="the interval holds both no change and the minimum effect",
        ),
        verdict(
            "early_exit(8) · depth 2 · batch 1 · T 0", verdict="IMPROVEMENT", baseline=0.54, candidate=0.71,
            ratio=1.315, low=1.29, high=1.34, flags=("unexplained",), reason="31.5 % faster, beyond 3 x the effect: "
            "a stale baseline, or work that is left out",
        ),
        verdict("early_exit(8) · depth 2 · batch 2 · T 0", verdict="IMPROVEMENT", ratio=1.08, low=1.06, high=1.1,
                reason="8.0 % faster"),
        verdict("suffix · depth 4 · batch 1 · T 0", "case", verdict="NEW", reason="not in the baseline",
                direction="both", **whole),
        verdict(name.format(4, 2), "acceptance_rate", direction="both", baseline=0.336, candidate=0.336, ratio=1.0,
                low=None, high=None, min_effect=0.0, p_value=None, q_value=None, reason="equal"),
        verdict(name.format(4, 2), "peak_memory_bytes", direction="down", baseline=764948480.0, candidate=764948480.0,
                ratio=1.0, low=None, high=None, min_effect=0.01, p_value=None, q_value=None, reason="equal"),
        exit_code=ExitCode.FAILED,
        reasons=("2 regressions", "1 invalid cell", "1 missing case"),
        armed=True,
        compared=7,
        notes=("baseline: entry 2 of 2026-01-31 by A. Name: after the new kernel",),
    )  # fmt: skip


def passed() -> GateResult:
    return result(
        verdict(), verdict(metric="acceptance_rate", baseline=0.336, candidate=0.336, ratio=1.0, low=None, high=None)
    )


def hostile() -> GateResult:
    """Every text from outside is one that means something somewhere."""
    verdicts = [
        verdict(text, text or "speedup", verdict=VERDICTS[place % len(VERDICTS)], reason=text, flags=(text,),
                case_hash=str(place), baseline=[0.0, 1e-300, -1e308, None][place % 4])
        for place, text in enumerate(HOSTILE)
    ]  # fmt: skip
    return result(
        *verdicts, scenario=HOSTILE[0] + HOSTILE[5], candidate_dir=HOSTILE[1], baseline_dir=HOSTILE[4], reasons=HOSTILE,
        notes=HOSTILE, policy={HOSTILE[7]: HOSTILE[7], "x": float("nan")}, exit_code=ExitCode.BAD_ENVIRONMENT,
        fingerprint_candidate=HOSTILE[3],
    )  # fmt: skip


def huge(cases: int = 2000, metrics: int = 4) -> GateResult:
    """More than any page takes; one case in ten is a regression."""
    noise = random.Random(0)
    verdicts = [
        verdict(
            f"eagle2(59) · depth {case} · batch {2**metric} · T 0", f"metric_{metric}", case_hash=f"{case:016x}",
            verdict="REGRESSION" if case % 10 == 0 else "PASS", severity=noise.random(), reason="漢字 | `x` @y " * 20,
        )
        for case in range(cases) for metric in range(metrics)
    ]  # fmt: skip
    return result(*verdicts, exit_code=ExitCode.FAILED, reasons=tuple(f"reason {i}: {'x' * 300}" for i in range(3000)))


def render_golden() -> dict[str, str]:
    """Golden file's name -> what it should hold."""
    from specbench.gate.render_json import render_json
    from specbench.gate.render_junit import render_junit
    from specbench.gate.render_markdown import render_markdown

    files = {}
    for name, made in (("sample", sample()), ("passed", passed()), ("hostile", hostile())):
        files[f"gate-{name}.md"] = render_markdown(made)
        files[f"gate-{name}.xml"] = render_junit(made)
        files[f"gate-{name}.json"] = render_json(made)
    return files


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden_name, text in render_golden().items():
        (GOLDEN / golden_name).write_text(text, encoding="utf-8")
