"""Compile the kernels for a device that need not be there: python tests/triton_compile.py cuda:90

Drives the back-end through a step with full and one with compact state, in which every launch compiles instead, and
prints one line of JSON per kernel and kind of operands: how often instructions that round otherwise than the CPU occur
in its assembly.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onebit import lamb
from onebit.backend import BucketStep, Hypers, Momentum
from onebit.codec import OneBit
from onebit.kernels import triton_operands
from onebit.kernels.compact import Int8
from onebit.layout import FlatLayout
from onebit.triton_backend import TritonBackend

TARGETS = {"cuda:90": GPUTarget("cuda", 90, 32), "hip:gfx942": GPUTarget("hip", "gfx942", 64)}
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
SUSPECTS = ("fma.rn.f32", "div.full.f32", "div.approx", "sqrt.approx", ".ftz")


def main(name: str) -> None:
    done = set()

    def compile_instead(kernel, grid, device, *args, **constants):
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        signature, values = {}, {}
        for word, value in given.items():
            if isinstance(value, torch.Tensor):
                signature[word] = TYPES[value.dtype]
            elif word in constants or value is None or value == 1:
                signature[word], values[(kernel.arg_names.index(word),)] = "constexpr", value
            else:
                signature[word] = "i32"
        key = (kernel.__name__, *signature.items())
        if key in done:
            return
        done.add(key)
        source = ASTSource(kernel, signature, values)
        built = triton.compile(source, target=TARGETS[name], options={"enable_fp_fusion": False})
        text = built.asm.get("ptx", "")
        compact = any(t.dtype in (torch.int8, torch.int16) for t in args if isinstance(t, torch.Tensor))
        found = {word: text.count(word) for word in SUSPECTS if word in text}
        print(json.dumps({"kernel": kernel.__name__, "compact": compact, **found}))

    triton_operands.launch = compile_instead
    sizes, cpu = [5, 9000], torch.device("cpu")
    layout = FlatLayout([(size,) for size in sizes], 2)
    (bucket,) = layout.buckets
    hypers = Hypers(layout, [lamb.Hyper(0.1, 0.9, 0.99, 1e-6, 0.01)])
    backend, x = TritonBackend(layout, cpu), [torch.zeros(size) for size in sizes]
    flat, ones, keep = torch.zeros(bucket.numel), torch.ones(2), torch.tensor(True)
    backend.gather(bucket, x, flat)
    backend.warmup_measure(bucket, x, flat, flat, flat, hypers)
    backend.warmup_apply(bucket, x, flat, flat, flat, hypers, ones, keep)
    codec = backend.codec(bucket, OneBit())
    codec.set_alive(torch.ones(bucket.numel, dtype=torch.bool))
    packed = codec.packed_alive
    now = Momentum(torch.zeros(2, codec.message_bytes, dtype=torch.uint8), packed)
    step = BucketStep(codec, hypers, None, 7, keep)
    for error, v in [(flat, flat), (Int8.zeros(bucket), flat.bfloat16())]:
        source = backend.source(step, x, now, packed)
        sent = source.encode(codec, error, None)
        source.commit(codec, error, None, sent, keep)
        backend.measure(step, x, now, now, v, v, "sqrt")
        backend.apply(step, x, now, v, ones)
    reply = codec.serve(sent, 0, flat[: bucket.chunk], None)
    codec.commit_served(sent, 0, flat[: bucket.chunk], None, reply, keep)


if __name__ == "__main__":
    main(sys.argv[1])
