"""Kernels of a profile, sorted by their names."""

from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks.kernel_kinds import Spent, by_kind, kind_of

KINDS = {"products": r"gemm|mm$", "rectangles": r"gem", "fills": r"^fill"}
COMPILED = {"products": r"^triton_mm"}


def event(name: str, us: float, count: int) -> FunctionEventAvg:
    found = FunctionEventAvg()
    found.key, found.count, found.self_device_time_total = name, count, us
    return found


def test_the_first_kind_that_fits() -> None:
    assert kind_of("Some_GEMM_128", KINDS) == "products"
    assert kind_of("gem_refill", KINDS) == "rectangles"
    assert kind_of("refill", KINDS) == "rest" and kind_of("refill", KINDS, rest="x") == "x"
    assert kind_of("Re" * 40, KINDS, rest=None) == "Re" * 30


def test_kernels_of_compiled_blocks_have_a_table_of_their_own() -> None:
    assert kind_of("triton_poi_gemm", KINDS) == "products"
    assert kind_of("triton_poi_gemm", KINDS, compiled=COMPILED) == "rest"
    assert kind_of("triton_mm_1", KINDS, compiled=COMPILED) == "products"
    assert kind_of("triton_mm_1", KINDS) == "rest"
    assert kind_of("gemm", KINDS, compiled=COMPILED) == "products"


def test_time_and_launches_add_up() -> None:
    events = [
        event("gemm_a", 2.0, 3),
        event("other", 4.0, 1),
        event("gemm_b", 0.5, 2),
        event("cudaLaunchKernel", 0.0, 6),
    ]
    common = {"products": Spent(2.5, 5), "rectangles": Spent(), "fills": Spent()}
    found = by_kind(events, KINDS)
    assert found == {**common, "rest": Spent(4.0, 1)}
    assert list(found) == [*KINDS, "rest"]
    assert by_kind(events, KINDS, rest=None) == {**common, "other": Spent(4.0, 1)}
