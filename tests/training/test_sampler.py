"""The sampler's position is state; the order is a function of seed and epoch; no global generator is touched."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, TensorDataset

from spotheal.training.sampler import ExactSampler, SeededSamples, exact_loader


def test_an_epoch_is_every_sample_once_and_the_next_is_ordered_otherwise() -> None:
    sampler = ExactSampler(100, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(100))
    sampler.next_epoch()
    assert sorted(sampler) == list(range(100))
    assert list(sampler) != first
    assert list(ExactSampler(100, seed=1)) == first
    assert list(ExactSampler(100, seed=2)) != first


@pytest.mark.parametrize("used", [0, 1, 37, 99, 100])
def test_a_restored_sampler_goes_on_with_the_very_next_sample(used: int) -> None:
    sampler = ExactSampler(100, seed=1)
    sampler.next_epoch()
    whole = list(sampler)
    sampler.advance(used)
    other = ExactSampler(100, seed=1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == whole[used:]
    assert len(other) == 100 - used
    assert other.next_ids(5) == whole[used : used + 5]


@pytest.mark.parametrize("change", [{"length": 99}, {"seed": 2}, {"shuffle": False}])
def test_a_position_in_another_order_is_refused(change: dict[str, Any]) -> None:
    figures: dict[str, Any] = {"length": 100, "seed": 1, "shuffle": True, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        ExactSampler(**figures).load_state_dict(ExactSampler(100, seed=1).state_dict())


@pytest.mark.parametrize(("length", "size"), [(100, 4), (101, 4), (3, 8)])
def test_ranks_share_an_epoch_evenly_and_leave_nothing_out(length: int, size: int) -> None:
    shares = [list(ExactSampler(length, seed=1, rank=rank, world_size=size)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert {index for share in shares for index in share} == set(range(length))
    dropped = [list(ExactSampler(length, seed=1, rank=r, world_size=size, drop_last=True)) for r in range(size)]
    used = [index for share in dropped for index in share]
    assert len(used) == len(set(used)) == length // size * size


def test_another_world_size_goes_on_without_a_sample_twice() -> None:
    two = [ExactSampler(96, seed=1, rank=rank, world_size=2) for rank in range(2)]
    used = [index for sampler in two for index in list(sampler)[:16]]
    for sampler in two:
        sampler.advance(16)
    four = [ExactSampler(96, seed=1, rank=rank, world_size=4) for rank in range(4)]
    for sampler in four:
        sampler.load_state_dict(two[0].state_dict())
    rest = [index for sampler in four for index in sampler]
    assert sorted(used + rest) == list(range(96))


@pytest.mark.parametrize(("length", "batch"), [(96, 5), (101, 4), (120, 7)])
def test_two_then_three_then_one_rank_see_each_sample_of_an_epoch_once(length: int, batch: int) -> None:
    """The places at which they change are no multiple of the next number of ranks."""
    state: dict[str, Any] | None = None
    used: list[int] = []
    for size, steps in ((2, 2), (3, 3), (1, 10**6)):
        ranks = [ExactSampler(length, seed=1, rank=rank, world_size=size) for rank in range(size)]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        for _ in range(steps):
            if not len(ranks[0]):
                break
            for sampler in ranks:
                mine = sampler.next_ids(batch)
                used += mine
                sampler.advance(len(mine))
        state = ranks[0].state_dict()
    assert sorted(used) == list(range(length))


def test_a_rest_that_cannot_be_shared_evenly_is_padded_and_the_next_epoch_is_whole_again() -> None:
    alone = ExactSampler(10, seed=1)
    alone.advance(5)
    two = [ExactSampler(10, seed=1, rank=rank, world_size=2) for rank in range(2)]
    for sampler in two:
        sampler.load_state_dict(alone.state_dict())
    order = list(ExactSampler(10, seed=1))
    assert [index for pair in zip(*two, strict=True) for index in pair] == [*order[5:], order[0]]
    for sampler in two:
        sampler.next_epoch()
    assert sorted(index for sampler in two for index in sampler) == list(range(10))


class Noisy(Dataset[Any]):
    """Draws from every generator, as augmentations do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), torch.rand(()).item()


def drawn(workers: int, skip: int = 0, epoch: int = 0) -> list[tuple[float, ...]]:
    sampler = ExactSampler(40, seed=3)
    for _ in range(epoch):
        sampler.next_epoch()
    sampler.advance(skip)
    samples = SeededSamples(Noisy(), seed=3)
    samples.set_epoch(epoch)
    return [
        tuple(float(column[row]) for column in batch)
        for batch in exact_loader(samples, sampler, 4, workers)
        for row in range(len(batch[0]))
    ]


def test_augmentation_is_the_same_with_any_number_of_workers_and_after_a_resume() -> None:
    whole = drawn(workers=0)
    assert drawn(workers=2) == whole
    assert drawn(workers=2, skip=12) == whole[12:]
    assert drawn(workers=0, epoch=1) != whole


def test_loading_in_the_trainings_own_process_leaves_its_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    drawn(workers=0)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_dataset_is_drawn_by_whole_batches_of_the_same_content(workers: int) -> None:
    images, labels = torch.arange(60.0).reshape(10, 2, 3), torch.arange(10)
    drawn = list(exact_loader(TensorDataset(images, labels), ExactSampler(10, seed=3), 4, workers))
    plain = list(DataLoader(TensorDataset(images, labels), batch_size=4, sampler=ExactSampler(10, seed=3)))
    assert len(drawn) == len(plain) == 3
    for one, other in zip(drawn, plain, strict=True):
        assert type(one) is type(other)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def test_the_data_set_of_a_loader_can_be_used_by_any_other_loader_and_collate_fn() -> None:
    loader = exact_loader(TensorDataset(torch.arange(6.0), torch.arange(6)), ExactSampler(6, shuffle=False), 3)
    assert isinstance(loader.dataset, TensorDataset)
    again = list(DataLoader(loader.dataset, batch_size=3))
    assert [batch[1].tolist() for batch in again] == [[0, 1, 2], [3, 4, 5]]
    own = exact_loader(TensorDataset(torch.arange(6)), ExactSampler(6, shuffle=False), 3, collate_fn=list)
    assert [[int(sample[0]) for sample in batch] for batch in own] == [[0, 1, 2], [3, 4, 5]]


def test_a_loader_without_batches_gives_sample_by_sample_what_torchs_gives() -> None:
    data = TensorDataset(torch.arange(4.0) * 10, torch.arange(4))
    ours = next(iter(exact_loader(data, ExactSampler(4, shuffle=False), None)))
    theirs = next(iter(DataLoader(data, batch_size=None)))
    assert [type(one) for one in ours] == [type(one) for one in theirs] and len(ours) == 2
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_whole_batches_lie_in_memory_as_torchs() -> None:
    images = torch.rand(6, 3, 4, 4).to(memory_format=torch.channels_last)
    (batch,) = next(iter(exact_loader(TensorDataset(images), ExactSampler(6, shuffle=False), 3)))
    (theirs,) = next(iter(DataLoader(TensorDataset(images), batch_size=3)))
    assert torch.equal(batch, theirs) and batch.stride() == theirs.stride()


SAID = "nothing is left of epoch 0, and nothing is trained now: call sampler.next_epoch()"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("leaves", [False, True])
def test_an_epoch_that_is_not_closed_is_named_when_the_next_would_begin(
    workers: int, leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ExactSampler(6)
    loader = exact_loader(TensorDataset(torch.arange(6)), sampler, 2, workers)
    for (batch,) in loader:
        sampler.advance(len(batch))
        if leaves and not len(sampler):
            break
    assert not caplog.records
    assert list(loader) == []
    assert SAID in caplog.text


def test_an_epoch_that_was_over_at_the_resume_is_named_the_second_time_alone(caplog: pytest.LogCaptureFixture) -> None:
    before = ExactSampler(4)
    before.advance(4)
    sampler = ExactSampler(4)
    loader = exact_loader(TensorDataset(torch.arange(4)), sampler, 2)
    next(iter(loader))  # a look at the shapes
    sampler.load_state_dict(before.state_dict())
    assert list(loader) == [] and not caplog.records  # a resume right behind the last batch
    assert list(loader) == []
    assert SAID in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_that_are_closed_or_left_in_their_middle_are_not_named(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ExactSampler(6)
    loader = exact_loader(TensorDataset(torch.arange(6)), sampler, 2, workers)
    for epoch in range(3):
        for (batch,) in loader:
            sampler.advance(len(batch))
            if epoch == 1:
                break
        for (batch,) in loader if epoch == 1 else ():
            sampler.advance(len(batch))
        sampler.next_epoch()
    for _ in range(2):
        for _ in loader:
            loader.advance()  # closes the epoch by itself
    assert not caplog.records
    assert sampler.epoch == 5
