"""Two processes with gloo between them: one plan for both, and gradients as without a budget, bit by bit."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rematch.execute.ranks import in_a_group
from tests.processes import Results, of_two_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs a torch built with distributed training"),
    pytest.mark.xdist_group("two ranks"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What both ranks wrote, by case."""
    cases = ["data_parallel", "sharded", "tensor_parallel", "stages"]
    return of_two_ranks("tests.execute.two_ranks", tmp_path_factory.mktemp("ranks"), cases)


@pytest.fixture(scope="module")
def compiled_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return of_two_ranks("tests.execute.two_ranks", tmp_path_factory.mktemp("compiled"), ["compiled"])


def test_all_ranks_take_the_plan_of_rank_0(results: Results) -> None:
    first, second = results["data_parallel"]
    assert first["recomputed"] > 0
    assert first["schedule"] == second["schedule"]
    assert first["solve_seconds"] == second["solve_seconds"], "the search was rank 0's"
    assert first["alone"] != second["alone"], "with share=False each rank searches"


@pytest.mark.parametrize("rank", range(2))
def test_data_parallel(results: Results, rank: int) -> None:
    result = results["data_parallel"][rank]
    assert result["equal"]
    assert len(result["buckets"]) > 2
    assert result["buckets"] == result["plain_buckets"], "buckets leave as early as without a budget"
    assert "rematch first, then DistributedDataParallel" in result["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by_remat", "inside", "outside"])
def test_data_parallel_and_torch_compile(compiled_results: Results, how: str) -> None:
    results = compiled_results["compiled"]
    ranks = [result[how] for result in results]
    for result, found in zip(results, ranks, strict=True):
        assert found["close"]
        assert found["recomputed"] > 0
        assert found["peak"] <= result["budget"], "all buckets together"
    assert ranks[0]["norms"] == ranks[1]["norms"], "gradients are those of both ranks"
    assert how == "by_remat" or ranks[0]["graphs"] > 1, "torch compiles a graph for each bucket"


@pytest.mark.parametrize("rank", range(2))
def test_sharded_by_blocks_and_as_a_whole(results: Results, rank: int) -> None:
    result = results["sharded"][rank]
    assert result["blocks"] and result["whole"]
    assert min(result["blocks_recomputed"]) > 0 and min(result["whole_recomputed"]) > 0
    assert "rematch first, then fully_shard" in result["refused"]
    for name in ("blocks", "whole"):
        measured, planned = result[f"{name}_saved"]
        assert measured >= planned > 0, "memory that plans save is saved, whatever FSDP2 has beside it"
    peak_bytes, budget_bytes = result["whole_peak"]
    assert peak_bytes <= budget_bytes


def test_tensor_parallel_neither_hangs_nor_differs(results: Results) -> None:
    assert all(result["equal"] for result in results["tensor_parallel"])


def test_pipeline_stages_have_budgets_of_their_own(results: Results) -> None:
    for rank in results["stages"]:
        for microbatches, result in rank.items():
            assert result["equal"]
            assert result["recomputed"] > 0
            others = (int(microbatches) - 1) * result["in_flight"]
            assert result["peak"] <= result["budget"] + others, "a budget is for one microbatch"


def test_one_process_is_no_group() -> None:
    assert not in_a_group()
