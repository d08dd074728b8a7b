"""The compiled module. Addresses are `Tensor.data_ptr()`, 0 for none; `native.py` is the checked interface."""

MAX_TILE: int
ERROR_GROUP: int

class Plan:
    def __init__(
        self, table: int, count: int, blocks_per_chunk: list[int], layers: int, numel: int, tile: int
    ) -> None: ...

class List:
    def __init__(self, addresses: list[int], types: list[int]) -> None: ...

class Signs:
    def __init__(self, bits: int, stride: int, scales: int, alive: int) -> None: ...

class Flat:
    def __init__(self, data: int, type: int, scales: int) -> None: ...

def worker_encode(
    plan: Plan,
    grads: List,
    hyper: int,
    momentum: Signs,
    momentum_flat: int,
    layer_scale: int,
    error: Flat,
    error_factor: int,
    message: Signs,
    sums: int,
    absolute: bool,
    threads: int,
    /,
) -> int: ...
def worker_commit(
    plan: Plan,
    grads: List,
    hyper: int,
    momentum: Signs,
    momentum_flat: int,
    layer_scale: int,
    error: Flat,
    error_factor: int,
    message: Signs,
    threads: int,
    /,
) -> None: ...
def server_encode(
    plan: Plan,
    chunk: int,
    workers: int,
    received: Signs,
    error: int,
    error_factor: int,
    reply: Signs,
    sums: int,
    absolute: bool,
    threads: int,
    /,
) -> None: ...
def server_commit(
    plan: Plan,
    chunk: int,
    workers: int,
    received: Signs,
    error: int,
    error_factor: int,
    reply: Signs,
    threads: int,
    /,
) -> None: ...
def decode(plan: Plan, signs: Signs, layer_scale: int, out: int, threads: int, /) -> None: ...
def gather(plan: Plan, tensors: List, out: int, threads: int, /) -> None: ...
def lamb_measure(
    plan: Plan,
    hyper: int,
    x: List,
    now: Signs,
    before: Signs,
    before_flat: int,
    layer_scale: int,
    frozen: Flat,
    fresh: Flat,
    variance_form: bool,
    seed: int,
    step: int,
    index: int,
    largest: int,
    direction: int,
    update: int,
    threads: int,
    /,
) -> None: ...
def apply(
    plan: Plan, hyper: int, x: List, now: Signs, layer_scale: int, frozen: Flat, step: int, threads: int, /
) -> None: ...
def warmup_measure(
    plan: Plan,
    hyper: int,
    x: List,
    g: int,
    grads: List,
    m: int,
    v: int,
    direction: int,
    update: int,
    weight: int,
    threads: int,
    /,
) -> bool: ...
def warmup_apply(
    plan: Plan, hyper: int, x: List, g: int, grads: List, m: int, v: int, step: int, threads: int, /
) -> None: ...
def sum_squares(tensors: List, sizes: list[int], out: int, threads: int, /) -> None: ...
def quantise(starts: int, blocks: int, levels: int, x: int, integers: int, scales: int, threads: int, /) -> None: ...
def dequantise(
    starts: int, blocks: int, integers: int, scales: int, subtract: bool, out: int, threads: int, /
) -> None: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
