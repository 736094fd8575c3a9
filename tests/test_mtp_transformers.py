"""MTP modules against transformers' own (`generate(use_mtp=True)`): logits of every module, and whole generations.

transformers builds its modules from the decoder layer of the main model. The families that publish MTP there have
experts or latent attention; a dense main model whose config has `num_mtp_layers` gives the same modules with a dense
layer. Its positions are those of the tokens, one to num_mtp_layers further on than ours, which RoPE does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_tools import Weights, decode, make_decoder, make_request, outputs, prompts
from head_world import make_head

from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.heads.head import Head
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.config import spec_from_hf_config
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams
from specbench.engine.verify import Proposal
from specbench.roofline.shapes import ModelSpec

SHAPE: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FULL = "full_attention"


@dataclass
class Theirs:
    """A dense model of transformers with its MTP modules."""

    main: Any
    mtp: Any
    spec: ModelSpec
    num_modules: int

    @classmethod
    def of(cls, family: str, num_modules: int, **options: Any) -> Theirs:
        import transformers
        from transformers.modeling_layers import MtpModel

        if family != "Llama":
            options["mtp_layer_types"] = [FULL] * num_modules
        config = getattr(transformers, f"{family}Config")(**SHAPE, num_mtp_layers=num_modules, **options)
        main = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        fill(main, 1)
        mtp = MtpModel(main, num_modules).eval()
        fill(mtp.layers, 2)
        if mtp.use_shared_post_norm:
            fill(mtp.shared_post_norm, 3)
        spec = spec_from_hf_config({**config.to_dict(), **SHAPE, "eos_token_id": []}, "theirs")
        return cls(main, mtp, spec, num_modules)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """[V] after `drafted`, with `tokens` committed, the last of them pending: each module over the whole text."""
        from transformers.cache_utils import MtpCache

        ids, last = torch.tensor([tokens[1:]]), len(tokens)
        states = self.main(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=self.main.config.get_mtp_config())
        for module in range(len(drafted) + 1):
            positions = torch.arange(last - ids.shape[1], last)[None] + module
            states = self.mtp.forward_layer(module, states, positions, cache, input_ids=ids)
            if module < len(drafted):
                ids = torch.cat([ids[:, 1:], torch.tensor([[drafted[module]]])], dim=1)
        return self.mtp._project_to_logits(states[:, -1])[0]

    def target(self, **options: Any) -> Decoder:
        weights = {name.removeprefix("model."): t for name, t in self.main.state_dict().items()}
        return make_decoder(self.spec, weights, dtype="fp32", max_context=160, max_rows=160, **options)

    def head(self, target: Decoder) -> Head:
        layer = ModelSpec(**{**self.spec.__dict__, "num_layers": self.num_modules})
        sizes = {"target_hidden_size": self.spec.hidden_size, "target_vocab_size": self.spec.vocab_size}
        modules = {"num_modules": self.num_modules, "recycle": "post_norm"}
        spec = HeadSpec(kind="mtp", name="theirs", layer=layer, **sizes, **modules)  # type: ignore[arg-type]
        return make_head(spec, self.canonical(), target, max_rows=160)

    def canonical(self) -> Weights:
        weights: Weights = {}
        hidden_first = getattr(self.main.config, "mtp_hidden_states_first", False)
        for name, tensor in self.mtp.layers.state_dict().items():
            module, part = name.split(".", 1)
            if part.startswith("mtp_block."):
                weights[f"layers.{module}.{part.removeprefix('mtp_block.')}"] = tensor
            elif part == "eh_proj.weight" and hidden_first:
                weights[f"modules.{module}.{part}"] = tensor.roll(SHAPE["hidden_size"], dims=1)
            else:
                weights[f"modules.{module}.{part.replace('post_norm', 'norm')}"] = tensor
        if self.mtp.use_shared_post_norm:
            for module in range(self.num_modules):
                weights[f"modules.{module}.norm.weight"] = self.mtp.shared_post_norm.weight.detach()
        return weights


def fill(model: Any, seed: int) -> None:
    """Weights wide enough that the next token depends on the whole history."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(values if "embed" in name else values * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.3 * values if name.endswith("bias") else 1 + 0.2 * values)


VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, one": ("Llama", 1, {}),
    "llama, three": ("Llama", 3, {}),
    "llama, state first, one norm for all": (
        "Llama",
        2,
        {"mtp_hidden_states_first": True, "chain_hidden_post_norm": True},
    ),
    "qwen2, biases": ("Qwen2", 2, {}),
    "qwen3, q/k norms": ("Qwen3", 2, {}),
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Theirs]:
    return {name: Theirs.of(family, count, **options) for name, (family, count, options) in VARIANTS.items()}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_every_module_are_transformers(name: str, backend: str, theirs: dict[str, Theirs]) -> None:
    """One pass of each module over a text: state t and token t + 1 + k, fp32, to 1e-5 of the logits' spread."""
    one = theirs[name]
    target = one.target(backend=backend)
    head = one.head(target)
    (text,) = prompts(one.spec, [24 + one.num_modules], seed=4)
    count = 24
    _, states = target.prefill_states(list(text[:count]), 0, (-1,))
    assert states is not None
    head.kv.open(0, 64)
    head.kv.reserve(0, count)
    for module in range(one.num_modules):
        batch = ForwardBatch.of([list(text[1 + module : 1 + module + count])], [0], [0])
        output = head.forward(batch, states, module=module, recycled=module > 0, every_state=True)
        logits, states = output.logits.clone(), output.states.clone()
        for end in (1, 2, 9, count):
            # The text cut at row `end`: what stands behind it changes nothing there.
            expected = one.logits(text[: end + 1], text[end + 1 : end + 1 + module])
            worst = (logits[end - 1] - expected).abs().max() / expected.std()
            assert worst < 1e-5, f"module {module}, row {end - 1}: {worst:.1e}"


class Recorded(ModulesDrafter):
    """Keeps what was proposed in each step, by the number of tokens committed."""

    steps: list[tuple[tuple[int, ...], tuple[int, ...], Any]]

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = super().propose(active, depths)
        for one, proposal in zip(active, proposals, strict=True):
            tokens = (*one.request.prompt_ids, *one.tokens)
            self.steps.append((tokens, tuple(proposal.tree.tokens.tolist()), proposal.q))
        return proposals


@pytest.mark.parametrize("name", ["llama, three", "qwen3, q/k norms"])
def test_drafts_of_real_generations_are_drawn_from_transformers_laws(name: str, theirs: dict[str, Theirs]) -> None:
    one = theirs[name]
    target = one.target()
    drafter = Recorded(one.head(target))
    drafter.steps = []
    params = SamplingParams(temperature=1.0, seed=2)
    requests = [
        make_request(text, f"r{i}", max_tokens=14, params=params) for i, text in enumerate(prompts(one.spec, (7, 1)))
    ]
    decode(target, requests, drafter, batch_size=2, depth=one.num_modules)
    assert sum(len(drafted) for _, drafted, _ in drafter.steps) > 30
    for tokens, drafted, q in drafter.steps:
        for level, law in enumerate(q if q is not None else ()):
            expected = one.logits(tokens, drafted[:level]).softmax(dim=-1)
            torch.testing.assert_close(law, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama, one", "llama, three", "qwen2, biases"])
def test_greedy_generations_draft_what_transformers_drafts(
    name: str, theirs: dict[str, Theirs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate(use_mtp=True)` step by step, rejections and its own cache corrections included."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator
    from transformers.modeling_layers import MtpModel

    one = theirs[name]
    (prompt,) = prompts(one.spec, [9], seed=3)
    steps: dict[int, tuple[int, ...]] = {}
    candidates = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **options)
        if logits is not None:
            steps[input_ids.shape[1]] = tuple(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda main, device_map=None: one.mtp)
    new = 24
    prompt_ids = torch.tensor([prompt])
    mask = torch.ones_like(prompt_ids)
    text = one.main.generate(prompt_ids, attention_mask=mask, use_mtp=True, max_new_tokens=new, do_sample=False)

    target = one.target()
    drafter = Recorded(one.head(target))
    drafter.steps = []
    trace = decode(target, [make_request(prompt, max_tokens=new)], drafter, depth=one.num_modules)
    assert outputs(trace)["r"] == tuple(text[0, len(prompt) : len(prompt) + new].tolist())
    ours = {len(tokens): drafted for tokens, drafted, _ in drafter.steps if len(drafted) == one.num_modules}
    assert len(ours) > 5
    assert {length: steps[length] for length in ours} == ours
