"""One rank of a test: `python collectives_rank.py RANK NUM_RANKS RENDEZVOUS`. Exits 0 if every exchange is right."""

import sys

import torch

from minisgl_worker.parallel import ParallelGroup, choose_device, sum_in_rank_order

NUM_REPLAYS = 20


def make_parts(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What each rank contributes, known to all: [num_ranks, *shape] on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_ranks, *shape), generator=generator).to(dtype)


def check_sum(group: ParallelGroup, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Close to the definition, and the same bits on every rank, at once and replayed from a graph."""
    static = torch.empty(shape, dtype=dtype, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        group.sum(static.clone())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = group.sum(static.clone())
        gathered = group.gather(captured)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for seed in range(NUM_REPLAYS):
        parts = make_parts(group.size, shape, dtype, seed)
        static.copy_(parts[group.rank])
        graph.replay()
        eager = group.sum(static.clone())
        expected = sum_in_rank_order(parts).float()
        for found in (captured, eager):
            error = (found.float().cpu() - expected).abs() / (1 + expected.abs())
            assert error.max() < tolerance, f"{shape} {dtype}: off by {error.max()}"
        assert (gathered == gathered[0]).all(), f"{shape} {dtype}: the ranks' sums differ"


def check_gather(group: ParallelGroup, device: torch.device) -> None:
    parts = make_parts(group.size, (5, 7), torch.float32, 3)
    assert torch.equal(group.gather(parts[group.rank].to(device)).cpu(), parts)
    columns = group.gather_columns(parts[group.rank].to(device)).cpu()
    assert torch.equal(columns, torch.cat(list(parts), 1))
    ids = group.gather(torch.tensor([group.rank, -1], dtype=torch.int32, device=device))
    assert ids.tolist() == [[rank, -1] for rank in range(group.size)]


def main() -> None:
    rank, num_ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    group = ParallelGroup(rank, num_ranks)
    device = choose_device("cuda", group)
    group.join(rendezvous, device)
    check_gather(group, device)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 64), (1, 5120), (7, 5120), (256, 5120), (3000, 1024)):
            check_sum(group, device, shape, dtype)
    group.wait_for_all(device)


if __name__ == "__main__":
    main()
