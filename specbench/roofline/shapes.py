"""Shapes of decoders: the dataclasses and the published models, for whoever only needs to name one. No torch."""

from specbench.roofline.formats import DTYPE_BYTES
from specbench.roofline.model_spec import CompressedSpec, IndexerSpec, MlaSpec, ModelSpec, MoeSpec, RopeScaling
from specbench.roofline.shapes_named import NAMED_SHAPES, named_shape

__all__ = [
    "DTYPE_BYTES",
    "NAMED_SHAPES",
    "CompressedSpec",
    "IndexerSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "RopeScaling",
    "named_shape",
]
