"""The runner on CUDA against transformers and against itself on a CPU."""

from __future__ import annotations

import pathlib

import pytest
import torch
from driver import Driver, sampled
from reference import FAMILIES, greedy, save_tiny
from test_greedy import make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family(name: str, tmp_path: pathlib.Path) -> None:
    model = save_tiny(name, tmp_path)
    prompts = [list(range(at, at + 10 + 9 * at)) for at in range(6)]
    runner = make_runner(tmp_path, device="cuda")
    assert Driver(runner, chunk=16).generate(prompts, 24) == greedy(model, prompts, 24)


def test_sampled_tokens_equal_those_on_a_cpu(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path)
    prompts = [list(range(at, at + 12)) for at in range(4)]
    params = [sampled(1), sampled(2, 0.8, top_p=0.9), sampled(3, top_k=7), sampled(4, min_p=0.05)]
    here, there = (Driver(make_runner(tmp_path, device=device)).generate(prompts, 16, params) for device in ("cpu", "cuda"))
    assert here == there


@pytest.mark.whole_device
def test_pool_from_utilization(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path)
    runner = make_runner(tmp_path, device="cuda", kv_cache_memory=None, gpu_memory_utilization=0.2, max_num_seqs=8)
    assert runner.num_pages == 8 * 16 + 1
    assert len(Driver(runner).generate([[1, 2, 3]], 4)[0]) == 4


def test_results_are_read_late(tmp_path: pathlib.Path) -> None:
    """Steps launched before the results of earlier ones were asked for see their tokens on the device."""
    model = save_tiny("llama", tmp_path)
    runner = make_runner(tmp_path, device="cuda")
    driver = Driver(runner)
    sequence = driver.add(list(range(20)))
    driver.run_step([sequence])
    flights = []
    for _ in range(5):
        flights.append(runner.launch(driver._plan([(sequence, 1)], 1)))
        sequence.computed += 1
    late = [flight.result().tokens.item() for flight in flights]
    assert sequence.output + late == greedy(model, [list(range(20))], 6)[0]
