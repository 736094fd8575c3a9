"""Weights as torch tensors under canonical names, whatever they were stored as: safetensors, GGUF or dummy.

Canonical names are Hugging Face's without the "model." prefix; q and k are in the half-split RoPE convention (pairs
(i, i + D/2)). `tensor_shapes` is the one definition of which tensors a spec has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from specbench.engine.models.config import left_aside
from specbench.engine.models.gguf_weights import (
    PERMUTED_ARCHITECTURES,
    ROPE_FACTORS,
    GGUFFile,
    canonical_name,
    half_split_order,
    open_gguf,
)
from specbench.engine.models.sources import CONFIG_FILE, INDEX_FILE, ModelSource, read_json_object, safetensors_files
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

SHARED_EMBEDDINGS = "shares_embeddings"
"""Key of a draft model's config; "target": its embedding, tied, is the target's and is not stored."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_INCOMPLETE = "the checkpoint is incomplete: fetch it again, or pass the folder or file of the whole model"
_DUMMY_EMBEDDING_STD = 0.02
_DUMMY_NORM_STD = 0.02


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that `spec` has: no more and no fewer.

    Weights are [out, in]; `lm_head.weight` is there only if the embeddings are not tied. The element counts add up to
    `spec.num_params`.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (key, hidden, spec.qkv_bias),
        "self_attn.v_proj": (key, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.output_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (num_out, num_in, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (num_out,)
        if spec.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    return shapes


def load_weights(
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shared: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of `tensor_shapes(spec)` at once, in its order; the rest as `iter_weights`."""
    weights = dict(iter_weights(source, spec, dtype, device=device, seed=seed, shared=shared))
    return {name: weights[name] for name in tensor_shapes(spec)}


def iter_weights(
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shared: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of `tensor_shapes(spec)`, in the file's order, contiguous, in `dtype` on `device`.

    Tensors are read and converted one after another, so a consumer that packs each as it comes peaks at its own copy
    and little more. `seed` is for dummy weights only. `shared`: the target's tensors, for a draft model whose config
    says that it shares its embedding. Raises InputError, naming file and tensor, if one is missing,
    unexpected, of another shape or type, or not finite in `dtype`, and if a file is truncated or damaged.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"weights need a floating-point dtype, not {dtype}")
    shapes = tensor_shapes(spec)
    if source.kind == "dummy":
        for name, shape in shapes.items():
            yield name, _dummy(name, shape, dtype, torch.device(device), seed)
        return
    if source.path is None:
        raise InputError(f"a source of kind {source.kind} needs a path", key="model")
    if shares_embedding(source):
        tensor = _shared_embedding(source, shapes[_EMBEDDING], shared)
        shapes = {name: shape for name, shape in shapes.items() if name != _EMBEDDING}
        yield _EMBEDDING, torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
    if source.kind == "gguf":
        found = _read_gguf(open_gguf(source.path), spec, shapes, dtype, device)
    else:
        found = _read_safetensors(source.path, spec, shapes, dtype, device)
    seen: set[str] = set()
    for name, file, tensor in found:
        if name in seen:
            raise InputError("the tensor stands in two files", file=file, key=name)
        # Overflow shows here too: bf16 weights above 65504 are inf in fp16.
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"values that are not finite in {dtype}",
                file=file,
                key=name,
                remedy="use bf16 or fp32 if the dtype is fp16; otherwise the file is damaged: fetch it again",
            )
        seen.add(name)
        yield name, tensor
    missing = [name for name in shapes if name not in seen]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        remedy = (
            "the config says the head is not tied; check tie_word_embeddings" if missing == [_HEAD] else _INCOMPLETE
        )
        raise InputError(f"the tensor is missing{more}", file=source.path, key=missing[0], remedy=remedy)


def shares_embedding(source: ModelSource) -> bool:
    """Whether a model's folder holds no embedding because its config says that it is the target's."""
    config_file = None if source.path is None or source.kind == "gguf" else source.path / CONFIG_FILE
    if config_file is None or not config_file.is_file():
        return False
    value = read_json_object(config_file).get(SHARED_EMBEDDINGS)
    if value not in (None, "target"):
        raise InputError(f'{value!r} is not known; "target" is', file=config_file, key=SHARED_EMBEDDINGS)
    return value is not None


def embedding_of(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A target's embedding by its canonical name: `shared` of a draft model that shares it."""
    for name, tensor in iter_weights(source, spec, dtype):
        if name == _EMBEDDING:
            return {name: tensor}
    raise AssertionError("iter_weights ends without an embedding")


def _shared_embedding(
    source: ModelSource, shape: tuple[int, ...], shared: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    tensor = (shared or {}).get(_EMBEDDING)
    if tensor is None:
        raise InputError(
            "this draft model shares its target's embedding, so it can't be loaded alone",
            file=source.path,
            key=SHARED_EMBEDDINGS,
            remedy="use it as a drafter of kind draft_model",
        )
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"the target's embedding is {list(tensor.shape)}, and this draft model was made for {list(shape)}",
            file=source.path,
            key=SHARED_EMBEDDINGS,
            remedy="use it with the target that it was trained for",
        )
    return tensor


def _check_shape(
    name: str, stored_name: str, found: tuple[int, ...], shapes: dict[str, tuple[int, ...]], file: Path
) -> None:
    if name not in shapes:
        raise InputError(
            "unexpected tensor: the model described by the config has none of this name",
            file=file,
            key=stored_name,
            remedy="use a checkpoint of a plain Llama, Mistral, Qwen2 or Qwen3 model whose config matches its weights",
        )
    if found != shapes[name]:
        raise InputError(
            f"shape {list(found)}, but the config says {list(shapes[name])}",
            file=file,
            key=stored_name,
            remedy="config and weights are of different models, or the file is damaged",
        )


def _check_tied(head: torch.Tensor, embedding: torch.Tensor, file: Path) -> None:
    if not torch.equal(head, embedding):
        raise InputError(
            "differs from the embeddings, though tie_word_embeddings is true",
            file=file,
            key=_HEAD,
            remedy="set tie_word_embeddings to false in config.json if the model has a head of its own",
        )


def _canonical(stored_name: str) -> str:
    return stored_name.removeprefix("model.")


def _safetensors_plan(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Each file to read, with the stored names it must hold (None: whatever it holds)."""
    index, files = safetensors_files(folder)
    if index is None:
        return [(file, None) for file in files]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("must map tensor names to files", file=index, key="weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A shard's name is a plain file name: an index must not point out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{shard!r} is not a file name", file=index, key=f"weight_map.{name}")
        shards.setdefault(shard, set()).add(name)
    for shard, names in sorted(shards.items()):
        if not (folder / shard).is_file():
            raise InputError(
                f"the shard is missing; {INDEX_FILE} puts {len(names)} tensors in it, such as {min(names)}",
                file=folder / shard,
                remedy=_INCOMPLETE,
            )
    return [(folder / shard, names) for shard, names in sorted(shards.items())]


def _read_safetensors(
    folder: Path,
    spec: ModelSpec,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Path, torch.Tensor]]:
    """Yield (canonical name, file, tensor). A redundant head of a tied model is compared, then dropped; MTP modules are
    left aside."""
    from safetensors import SafetensorError, safe_open

    config_file = folder / CONFIG_FILE
    config = read_json_object(config_file) if config_file.is_file() else {}
    is_mtp = left_aside(config, spec.num_layers, config_file)
    tied: dict[str, tuple[Path, torch.Tensor]] = {}
    for path, expected in _safetensors_plan(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                stored_names = set(file.keys())
                absent = sorted((expected or set()) - stored_names)
                if absent:
                    raise InputError(
                        f"the tensor is missing, though {INDEX_FILE} puts it here",
                        file=path,
                        key=absent[0],
                        remedy=_INCOMPLETE,
                    )
                for stored_name in sorted(stored_names):
                    if stored_name.endswith("rotary_emb.inv_freq") or is_mtp(stored_name):
                        continue
                    name = _canonical(stored_name)
                    redundant = name == _HEAD and spec.tie_word_embeddings and _EMBEDDING in shapes
                    view = file.get_slice(stored_name)
                    known = {**shapes, _HEAD: shapes[_EMBEDDING]} if redundant else shapes
                    _check_shape(name, stored_name, tuple(view.get_shape()), known, path)
                    if view.get_dtype() not in _FLOAT_TYPES:
                        raise InputError(
                            f"stored as {view.get_dtype()}; quantised checkpoints are not read",
                            file=path,
                            key=stored_name,
                            remedy="use the unquantised checkpoint, or a GGUF file",
                        )
                    stored = file.get_tensor(stored_name)
                    if spec.tie_word_embeddings and name in (_HEAD, _EMBEDDING):
                        tied[name] = (path, stored)
                    if not redundant:
                        # A copy of our own: the stored tensor lies in a file map, perhaps unaligned.
                        out = torch.empty(stored.shape, dtype=dtype, device=device)
                        yield name, path, out.copy_(stored)
        except SafetensorError as error:
            raise InputError(
                f"not a whole safetensors file: {error}", file=path, remedy="the file is damaged: fetch it again"
            ) from None
        except OSError as error:
            raise InputError(f"can't be read: {error}", file=path) from None
    if _HEAD in tied and _EMBEDDING in tied:
        _check_tied(tied[_HEAD][1], tied[_EMBEDDING][1], tied[_HEAD][0])


def _read_gguf(
    gguf: GGUFFile,
    spec: ModelSpec,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Path, torch.Tensor]]:
    """Yield (canonical name, file, tensor), dequantised in float32 a block of rows at a time."""
    permuted = gguf.metadata.get("general.architecture") in PERMUTED_ARCHITECTURES
    for stored_name, stored in gguf.tensors.items():
        if stored_name == ROPE_FACTORS:
            continue
        name = canonical_name(stored_name) or stored_name
        _check_shape(name, stored_name, stored.shape, shapes, gguf.path)
        order = None
        if permuted and ".self_attn.q_proj." in name:
            order = half_split_order(spec.num_heads, spec.head_dim)
        elif permuted and ".self_attn.k_proj." in name:
            order = half_split_order(spec.num_kv_heads, spec.head_dim)
        out = torch.empty(stored.shape, dtype=dtype, device=device)
        rows = out.view(stored.shape[0], -1)
        for start, stop, values in gguf.float_blocks(stored_name, row_order=order):
            rows[start:stop] = torch.from_numpy(values)
        yield name, gguf.path, out


def _dummy(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random values from a seed of the tensor's own, so that neither order nor selection changes them.

    Norms are 1 + N(0, 0.02²), embeddings and biases N(0, 0.02²), other weights N(0, 1/in), which keeps activations
    of order one. Values are drawn in float32, so dtypes agree up to rounding; devices have different generators.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    norm = name.endswith("norm.weight")
    if norm:
        std = _DUMMY_NORM_STD
    elif len(shape) == 1 or name == _EMBEDDING:
        std = _DUMMY_EMBEDDING_STD
    else:
        std = 1 / math.sqrt(shape[1])
    out = torch.empty(shape, dtype=dtype, device=device)
    rows = out.view(shape[0], -1)
    step = max(1, (1 << 24) // rows.shape[1])
    for start in range(0, shape[0], step):
        part = rows[start : start + step]
        values = torch.randn(part.shape, generator=generator, device=device, dtype=torch.float32)
        part.copy_(values.mul_(std).add_(1.0 if norm else 0.0))
    return out
