"""What the tests of the native kernels share: one bucket, its codec, its plan, and operands with awkward values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from onebit.codec import BucketCodec, OneBit, _cut
from onebit.kernels import native
from onebit.kernels.reference import pack_bits, unpack_bits
from onebit.layout import FlatLayout

SPECIALS = [0.0, -0.0, 1e-45, -1e-40, 3e38, float("inf"), -float("inf"), float("nan")]
TILE = 128  # small, so that little tensors have many tiles


@dataclass
class World:
    """One bucket of layers of these sizes."""

    sizes: list[int]
    workers: int
    codec: OneBit
    seed: int
    tile: int = TILE

    def __post_init__(self) -> None:
        self.layout = FlatLayout([(size,) for size in self.sizes], self.workers)
        (self.bucket,) = self.layout.buckets
        (self.run,) = self.layout.runs
        self.blocks = [_cut(self.bucket, self.codec, chunk) for chunk in range(self.workers)]
        self.plan = native.Plan(self.bucket, self.blocks, self.tile)
        self.bucket_codec = BucketCodec(self.bucket, self.codec, torch.float32, torch.device("cpu"))
        self.random = torch.Generator().manual_seed(self.seed)

    def values(self, specials: bool = False, scale: float = 1.0) -> Tensor:
        """[numel], zero in the padding."""
        flat = torch.randn(self.bucket.numel, generator=self.random) * scale
        if specials:
            where = torch.rand(flat.shape, generator=self.random) < 0.05
            flat[where] = torch.tensor(SPECIALS)[
                torch.randint(len(SPECIALS), (int(where.sum()),), generator=self.random)
            ]
        flat[sum(self.sizes) :] = 0
        return flat

    def positive(self, spread: float = 3.0) -> Tensor:
        flat = torch.exp(spread * torch.randn(self.bucket.numel, generator=self.random))
        flat[sum(self.sizes) :] = 0
        return flat

    def split(self, flat: Tensor, dtype: torch.dtype = torch.float32, offset: int = 0) -> list[Tensor]:
        """One tensor of its own per layer, `offset` elements into its storage."""
        parts = []
        for layer in self.bucket.layers:
            storage = torch.zeros(layer.numel + offset, dtype=dtype)
            storage[offset:] = flat[layer.start : layer.stop].to(dtype)
            parts.append(storage[offset:])
        return parts

    def join(self, parts: Sequence[Tensor | None]) -> Tensor:
        return self.layout.gather(parts, torch.float32, torch.device("cpu"))

    def per_layer(self, low: float, high: float) -> Tensor:
        return torch.empty(len(self.sizes)).uniform_(low, high, generator=self.random)

    def signs(self, alive: Tensor | None = None, scale: float = 1.0) -> native.Signs:
        """Random signs and scales; alive: bool [numel]."""
        shape = (self.workers, self.bucket.chunk // 8)
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.random)
        scales = torch.rand(sum(self.plan.blocks), generator=self.random) * scale
        return native.Signs(bits, scales, None if alive is None else pack_bits(alive))

    def mask(self) -> Tensor:
        """bool [numel]; padding alive."""
        alive = torch.rand(self.bucket.numel, generator=self.random) < 0.7
        alive[sum(self.sizes) :] = True
        return alive

    def decoded(self, signs: native.Signs) -> Tensor:
        """Through the codec: [numel]."""
        return self.bucket_codec.decode(self.message(signs))

    def decoded_with(self, signs: native.Signs) -> Tensor:
        """The same with the mask of these signs."""
        alive = self.bucket_codec.alive
        self.bucket_codec.set_alive(None if signs.alive is None else unpack_bits(signs.alive))
        out = self.decoded(signs)
        self.bucket_codec.set_alive(alive)
        return out

    def message(self, signs: native.Signs) -> Tensor:
        codec = self.bucket_codec
        out = torch.zeros(self.workers, codec.message_bytes, dtype=torch.uint8)
        at = 0
        for chunk, blocks in enumerate(self.plan.blocks):
            out[chunk, : codec.head_bytes].view(torch.float32)[1 : 1 + blocks] = signs.scales[at : at + blocks]
            at += blocks
        out[:, codec.head_bytes : codec.head_bytes + self.bucket.chunk // 8] = signs.bits
        return out

    def parse(self, messages: Tensor, alive: Tensor | None = None) -> native.Signs:
        """The bits, as a view of the messages, and scales of `BucketCodec.encode`."""
        codec = self.bucket_codec
        scales = torch.cat([codec.scales(message, chunk) for chunk, message in enumerate(messages)])
        bits = messages[:, codec.head_bytes : codec.head_bytes + self.bucket.chunk // 8]
        return native.Signs(bits, scales, None if alive is None else pack_bits(alive))

    def spread(self, values: Tensor) -> Tensor:
        """[layers] -> [numel], 1 in the padding."""
        flat = torch.ones(self.bucket.numel)
        flat[: self.run.numel] = self.run.spread(values.float())
        return flat

    def scales_of(self, sums: Tensor, counts: Tensor) -> Tensor:
        """What the codec makes of the kernels' sums."""
        norm, size = (sums.sqrt(), counts.sqrt()) if self.codec.kind == "rms" else (sums, counts)
        return (norm / size * self.codec.multiplier).float()


def hyper(layers: int, decay: float = 0.01, eps: float = 1e-6, lr: float = 0.1) -> Tensor:
    return torch.tensor([[lr, 0.9, 0.99, eps, decay]], dtype=torch.float64).repeat(layers, 1)


sizes = st.lists(
    st.sampled_from([0, 1, 3, 7, 8, 15, 16, 17, 64, 127, 128, 129, 300, 1000]), min_size=1, max_size=5
).filter(lambda drawn: sum(drawn) > 0)
codecs = st.sampled_from(
    [OneBit(), OneBit(kind="mean"), OneBit(scale="block", block_elements=100), OneBit(scale="block", block_elements=8)]
)
worlds = st.builds(
    World, sizes, st.sampled_from([1, 2, 3]), codecs, st.integers(0, 2**31), st.sampled_from([128, 2048])
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, nan included; 0 and -0 count as equal."""
    return bool(
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0.0, 1e38, -1e38), b.nan_to_num(0.0, 1e38, -1e38))
    )


def near(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    return bool(torch.allclose(a.double(), b.double(), rtol=tolerance, atol=0, equal_nan=True))
