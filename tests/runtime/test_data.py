"""Formats of data, fingerprints, augmentation, and what the usual samplers lose where this one does not."""

import io
import json
import os
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DistributedSampler

from slurmddp.runtime import tasks
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.documents import Documents
from slurmddp.runtime.tasks.images import Augment
from slurmddp.runtime.tasks.lm import Windows
from slurmddp.runtime.tasks.text import ByteStream, find_files
from slurmddp.runtime.tasks.tokens import TokenStream, token_files

SMALL = {"layers": 1, "heads": 2, "width": 16}


def lm(path: Path | list[str], vocabulary: int | None = None, **data: Any) -> Any:
    where = str(path) if isinstance(path, Path) else path
    return tasks.create("lm", {"path": where, "context": 4, **data}, {**SMALL, "vocabulary": vocabulary})


def tokens(path: Path, dtype: str = "uint16") -> TokenStream:
    return TokenStream(token_files(find_files([str(path)], "**/*", []), dtype))


# Token files


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, list[int]]:
    """One stream of 0..999 in four files of different kinds, one of them in a folder of its own, in sorted order."""
    folder = tmp_path / "shards"
    (folder / "b").mkdir(parents=True)
    numbers = numpy.arange(1000)
    numpy.save(folder / "a.npy", numbers[:300].astype("int64"))
    numbers[300:303].astype("<u2").tofile(folder / "b" / "x.bin")
    numpy.save(folder / "c.npy", numbers[303:700].astype("uint16"))
    numbers[700:].astype("<u2").tofile(folder / "d.bin")
    return folder, numbers.tolist()


def test_token_files_are_one_stream(shards: tuple[Path, list[int]]) -> None:
    folder, numbers = shards
    stream = tokens(folder)
    assert len(stream) == 1000
    for start, count in ((0, 1000), (299, 2), (298, 10), (303, 1), (999, 1), (697, 5)):
        assert stream.read(start, count).tolist() == numbers[start : start + count]
    again = pickle.loads(pickle.dumps(stream))
    assert again.read(290, 30).tolist() == numbers[290:320] and again.fingerprint() == stream.fingerprint()
    assert stream.name_at(301) == f"{folder}/b/x.bin, token 1"


def test_the_task_trains_on_token_files(shards: tuple[Path, list[int]]) -> None:
    folder, numbers = shards
    (folder / "notes.txt").write_text("a file beside the tokens")
    task = lm(folder, vocabulary=1000, format="tokens", validation_fraction=0.1)
    parts = [task.train_samples(), task.validation_samples()]
    assert list(map(len, parts)) == [180, 20]
    found = sorted(part[index].tolist() for part in parts for index in range(len(part)))
    assert found == [numbers[start : start + 5] for start in range(0, 1000, 5)]
    batch = task.collate([parts[0][0], parts[0][1]])
    assert batch.dtype == torch.int32 and batch.shape == (2, 5)
    loss = task.loss(task.build_model(), batch)
    assert loss.count == 8 and loss.total.item() / 8 == pytest.approx(6.9, abs=0.2)  # log(1000)
    assert task.report({"loss": 2.0})["perplexity"] == pytest.approx(7.389, abs=1e-3)


@pytest.mark.parametrize(("dtype", "code", "top"), [("uint16", "H", 65535), ("uint32", "I", 2**32 - 1)])
def test_ids_are_unsigned(tmp_path: Path, dtype: str, code: str, top: int) -> None:
    (tmp_path / "t.bin").write_bytes(struct.pack(f"<3{code}", 1, top, top // 2 + 1))
    assert tokens(tmp_path, dtype).read(0, 3).tolist() == [1, top, top // 2 + 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path, workers: int) -> None:
    """Also from a data worker: one message, no traceback of the loader's around it."""
    numpy.arange(40, dtype="<u2").tofile(tmp_path / "t.bin")
    task = lm(tmp_path, vocabulary=37, format="tokens", validation_fraction=0)
    micros = loading.load(
        task, task.train_samples(), iter([loading.Wanted([0]), loading.Wanted([7])]), rank=0, workers=workers,
        pin_memory=False,
    )  # fmt: skip
    assert next(micros).ids == [0]
    with pytest.raises(UserError) as caught:
        next(micros)
    assert str(caught.value) == (
        f"{tmp_path}/t.bin, token 39: the token id 39 is not below train.model.vocabulary (37): check it and "
        "train.data.dtype"
    )


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + data


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.bin", b"abc", r"t\.bin: 3 bytes are not a whole number of uint16 tokens: check train\.data\.dtype"),
        ("t.npy", b"abcdefghijklmnop", r"t\.npy: its name ends with \.npy, but numpy\.save did not write it"),
        ("t.npy", npy("import os"), r"t\.npy: its header is not one of numpy\.save: b'import os'"),
        ("t.npy", npy("{'descr': '<u2'}"), "its header is not one"),
        (
            "t.npy",
            npy("{'descr': '<f4', 'shape': (1,)}", b"1234"),
            r"type '<f4' and shape \(1,\); token ids must be one row",
        ),
        ("t.npy", npy("{'descr': '>u2', 'shape': (1,)}", b"12"), "type '>u2' and shape"),
        ("t.npy", npy("{'descr': '<u2', 'shape': (2, 2)}", b"12345678"), r"shape \(2, 2\); token ids must be one row"),
        (
            "t.npy",
            npy("{'descr': '<u2', 'shape': (5,)}", b"1234"),
            "but its header says 5 tokens of <u2",
        ),
    ],
)
def test_files_that_hold_no_tokens(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        lm(tmp_path, vocabulary=10, format="tokens")


def test_a_later_version_of_npy(tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(npy("{'descr': '<u2', 'shape': (2,)} \n", b"\x01\0\x02\0", version=b"\x02\x00"))
    assert tokens(tmp_path).read(0, 2).tolist() == [1, 2]


def test_data_larger_than_memory_takes_none(tmp_path: Path) -> None:
    """A sparse file of a tebibyte: opened, fingerprinted and read in windows within a few megabytes."""
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            file.truncate(1 << 34)
        file.seek(-10, os.SEEK_END)
        file.write(struct.pack("<5H", 1, 2, 3, 4, 5))
    before = _resident()
    stream = tokens(tmp_path)
    windows = Windows(stream, 4, 1000, training=True, vocabulary=6)
    stream.fingerprint()
    for index in range(0, len(windows), len(windows) // 100):
        assert len(windows[index]) == 5
    assert stream.read(len(stream) - 5, 5).tolist() == [1, 2, 3, 4, 5]
    assert _resident() - before < 64 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_token_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(20000))
    stream = tokens(tmp_path)
    path.write_bytes(bytes(10))
    with pytest.raises(OSError, match=r"t\.bin had 20000 bytes at the start, and is now shorter than 18006"):
        stream.read(9000, 3)


# Documents


def documents(path: Path, key: str = "text") -> Documents:
    return Documents(ByteStream(find_files([str(path)], "**/*", [])), key)


def test_documents_of_many_files(tmp_path: Path) -> None:
    texts = ["one", 'zwei\n"ü"', "", "trois \ud800", "4" * 50, "sechs"]
    lines = [json.dumps({"id": 1, "text": text}) for text in texts]
    lines[1] = json.dumps({"text": texts[1]}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"\n{lines[0]}\r\n\n{lines[1]}\n  \n{lines[2]}", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(f"{lines[3]}\n{lines[4]}\n\n{lines[5]}\n\n")
    found = documents(tmp_path)
    assert len(found) == 6
    for number, text in enumerate(texts):
        whole = b"\0" + text.encode("utf-8", "surrogatepass") + b"\0"
        assert bytes(found.read(number, 99).tolist()) == whole
        assert bytes(found.read(number, 4).tolist()) == whole[:4]
    again = pickle.loads(pickle.dumps(found))
    assert again.read(4, 5).tolist() == [0, 52, 52, 52, 52]


def test_lengths_of_plain_lines_are_exact(tmp_path: Path) -> None:
    texts = ["x" * length for length in (0, 1, 5, 61, 62, 63, 500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = documents(tmp_path)
    assert found.lengths(64).tolist() == [2, 3, 7, 63, 64, 64, 64]
    assert found.lengths(64).tolist() == [len(found.read(number, 64)) for number in range(7)]


@pytest.mark.parametrize("validation_fraction", [0, 0.1, 0.3])
def test_lengths_are_those_of_the_samples(tmp_path: Path, validation_fraction: float) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in range(40)))
    task = lm(tmp_path, format="jsonl", context=30, validation_fraction=validation_fraction)
    samples = task.train_samples()
    assert task.lengths().tolist() == [len(samples[index]) for index in range(len(samples))]
    held = task.validation_samples()
    lengths = [len(part[index]) for part in (samples, held) for index in range(len(part))]
    assert sorted(lengths) == [min(31, length + 2) for length in range(40)]
    assert len(held) == int(40 * validation_fraction)


@pytest.mark.parametrize("line", ["no json", '{"txt": "x"}', '{"text": 3}', "[1]", '"text"', "{"])
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 3)
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    found = documents(tmp_path)
    with pytest.raises(UserError) as caught:
        found.read(4, 9)
    start = f"{tmp_path}/b.jsonl, byte 17: is not a line of JSON with text under 'text' (train.data.key): '"
    assert str(caught.value).startswith(start)


def test_an_own_key_and_ending(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text('{"body": "abc"}\n' * 4)
    (tmp_path / "readme.txt").write_text("no documents")
    task = lm(tmp_path, format="jsonl", key="body", validation_fraction=0)
    assert [task.train_samples()[3].tolist(), len(task.train_samples())] == [[0, 97, 98, 99, 0], 4]
    assert (
        tasks.create("lm", {"path": str(tmp_path), "format": "jsonl", "key": "b"}, {}).fingerprint()
        != task.fingerprint()
    )
    with pytest.raises(UserError, match=r"no file with content matches '\*\*/\*' and ends with \.bin or \.npy in"):
        lm(tmp_path, vocabulary=9, format="tokens")
    with pytest.raises(UserError, match="1 documents, too few for training and validation"):
        (tmp_path / "a.ndjson").write_text('{"body": "abc"}\n')
        lm(tmp_path, format="jsonl")


# Fingerprints


def _images(folder: Path) -> Any:
    return tasks.create("images", {"path": str(folder), "size": 4, "validation_fraction": 0}, {})


def _make(kind: str, folder: Path) -> Callable[[], str]:
    """Write a data set of several files, and return what gives its fingerprint."""
    if kind == "images":
        from PIL import Image

        for number in range(6):
            (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (5, 5), (number * 40, 0, 0)).save(folder / f"class{number % 2}" / f"{number}.png")
        return lambda: str(_images(folder).fingerprint())
    for number in range(6):
        (folder / f"sub{number % 2}").mkdir(parents=True, exist_ok=True)
        path = folder / f"sub{number % 2}" / f"{number}.{'jsonl' if kind == 'jsonl' else 'bin'}"
        path.write_text(f'{{"text": "document {number}"}}\n' * 4)
    vocabulary = 40000 if kind == "tokens" else None
    return lambda: str(lm(folder, vocabulary=vocabulary, format=kind).fingerprint())


KINDS = ["bytes", "tokens", "jsonl", "images"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_systems_order_does_not_matter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = _make(kind, tmp_path)
    before, turned = fingerprint(), []
    for name in ("glob", "rglob", "iterdir"):
        real = getattr(Path, name)

        def backwards(self: Path, *arguments: Any, real: Any = real) -> Iterator[Path]:
            found = list(real(self, *arguments))
            turned.append(found != found[::-1])
            return iter(found[::-1])

        monkeypatch.setattr(Path, name, backwards)
    assert fingerprint() == before
    assert any(turned), "the listing really was another one"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_is_that_of_names_sizes_and_content(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    fingerprint, elsewhere = _make(kind, first), _make(kind, second)
    assert fingerprint() == elsewhere(), "where it lies does not matter"
    files = sorted(path for path in second.rglob("*") if path.is_file())
    content = files[0].read_bytes()
    seen = {fingerprint()}
    changed = content[:-1] + bytes([content[-1] ^ 1])
    if kind in ("tokens", "bytes", "jsonl"):
        files[0].write_bytes(content + content[:2])
        seen.add(elsewhere())
        assert len(seen) == 2, "size"
    files[0].write_bytes(changed)
    seen.add(elsewhere())
    files[0].write_bytes(content)
    files[0].rename(files[0].with_name(f"0b{files[0].suffix}"))
    seen.add(elsewhere())
    assert len(seen) == (4 if kind != "images" else 3)


def test_the_middle_of_a_large_file_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    content = bytearray(3_000_000)
    path.write_bytes(content)
    before = ByteStream([("large.txt", path, len(content))]).fingerprint()
    content[1_400_000:1_600_000] = b"\1" * 200_000
    path.write_bytes(content)
    assert ByteStream([("large.txt", path, len(content))]).fingerprint() != before


# Augmentation


class Noisy:
    """Samples are their number; augmented, a random number is added."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 0.0])

    def augment(self, sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return sample + torch.tensor([0.0, float(torch.rand((), generator=generator))])

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)


def augmented(
    world: int, workers: int, first: int = 0, steps: int = 12, seed: int = 7, micro: int = 2
) -> list[tuple[int, ...]]:
    """(step, id, random number) of all samples, 5 a step."""
    task: Any = Noisy()
    seen = []
    for rank in range(world):
        lists = loading.training_lists(
            SampleOrder(20, seed), start=first * 5, steps=steps, total=5, micro=micro, world=world, rank=rank
        )
        torch.manual_seed(rank * 1000 + workers)  # The rank's own stream must not matter.
        step = first
        for micro_batch in loading.load(task, task, lists, rank=rank, workers=workers, pin_memory=False, prefetch=1):
            assert micro_batch.data[:, 0].tolist() == micro_batch.ids
            if micro_batch.real:
                seen += [(step, int(index), value) for index, value in micro_batch.data.tolist()]
            step += micro_batch.last
    return sorted(seen)


def test_augmentation_is_of_seed_epoch_and_sample() -> None:
    whole = augmented(1, 0)
    assert augmented(3, 0) == whole and augmented(2, 2) == whole and augmented(1, 0, micro=5) == whole
    assert augmented(2, 0, steps=7) + augmented(3, 1, first=7, steps=5) == whole, "resumed, on other ranks and workers"
    values = [value for *_, value in whole]
    assert len(set(values)) == len(values) == 60, "another one for each sample in each epoch"
    other = {(step, index): value for step, index, value in augmented(1, 0, seed=8)}
    assert not set(other.values()) & set(values)


def test_validation_samples_are_not_augmented() -> None:
    task: Any = Noisy()
    lists = loading.evaluation_lists(7, micro=2, world=1, rank=0)
    micros = loading.load(task, task, lists, rank=0, workers=0, pin_memory=False)
    assert [micro.data[:, 1].tolist() for micro in micros] == [[0, 0], [0, 0], [0, 0], [0]]


@pytest.mark.parametrize(("kind", "most"), [("flip", 2), ("crop", 9), ("crop+flip", 18)])
def test_images_are_flipped_and_moved(kind: str, most: int) -> None:
    image = torch.arange(1.0, 193.0).view(3, 8, 8)
    seen = {}
    for number in range(300):
        changed, label = Augment(kind)((image, 5), torch.Generator().manual_seed(number))
        assert changed.shape == image.shape and label == 5
        assert set(changed.unique().tolist()) <= {0.0, *image.unique().tolist()}
        seen[tuple(changed.flatten().tolist())] = changed
    assert len(seen) == most
    assert any(torch.equal(changed, image) for changed in seen.values())
    assert any(torch.equal(changed, image.flip(2)) for changed in seen.values()) == ("flip" in kind)


def test_the_images_task_augments(tmp_path: Path) -> None:
    images = numpy.random.default_rng(0).random((12, 8, 8)).astype("float32")
    numpy.savez(tmp_path / "i.npz", images=images, labels=numpy.arange(12) % 2)
    data = {"path": str(tmp_path / "i.npz"), "validation_fraction": 0}
    plain: Any = tasks.create("images", data, {})
    task: Any = tasks.create("images", {**data, "augment": "crop+flip"}, {})
    assert task.fingerprint() == plain.fingerprint() and plain.augment is None

    def batches(task: Any) -> torch.Tensor:
        lists = loading.training_lists(SampleOrder(12, 1), start=0, steps=1, total=12, micro=12, world=1, rank=0)
        found: torch.Tensor = next(
            loading.load(task, task.train_samples(), lists, rank=0, workers=0, pin_memory=False)
        ).data[0]
        return found

    assert torch.equal(batches(task), batches(task))
    assert not torch.equal(batches(task), batches(plain))
    numpy.savez(tmp_path / "i.npz", x=images.reshape(12, 64), y=numpy.arange(12) % 2)
    with pytest.raises(UserError, match="contains rows of 64 features, not images: remove it"):
        tasks.create("images", {**data, "augment": "flip"}, {})


# What the usual samplers lose


def our_stream(world: int, *, first: int, steps: int, length: int = 64, total: int = 8) -> list[int]:
    """Ids of these steps over all ranks. All that is kept between two calls is `first`."""
    return [
        index
        for rank in range(world)
        for wanted in loading.training_lists(
            SampleOrder(length, 1), start=first * total, steps=steps, total=total, micro=2, world=world, rank=rank
        )
        for index in wanted.ids
    ]


def test_a_resume_from_2_to_4_ranks_loses_nothing() -> None:
    """Stopped after 16 of 64 samples: torchdata's sampler, resumed on 4 ranks, never gives 16 of them in the epoch."""
    reason = "torchdata is not installed here (pip install torchdata)"
    stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason=reason).StatefulDistributedSampler
    data = list(range(64))
    used, states = [], []
    for rank in range(2):
        sampler = stateful(data, num_replicas=2, rank=rank, seed=1)
        used += list(islice(iter(sampler), 8))
        states.append(sampler.state_dict())
    for rank in range(4):
        sampler = stateful(data, num_replicas=4, rank=rank, seed=1)
        sampler.load_state_dict(states[rank % 2])
        used += list(sampler)
    assert len(set(data) - set(used)) == 16
    ours = our_stream(2, first=0, steps=2) + our_stream(4, first=2, steps=6)
    assert sorted(ours) == data


def test_one_state_for_all_ranks_is_the_whole_state() -> None:
    """A loader's state written by every rank to one file of that name (as Accelerate does) is that of the rank that
    came last: here ranks have shards of their own, and all go on in the last one's. Ours is one number, the same
    on every rank, and loses nothing.
    """
    shards = [list(range(rank, 12, 3)) for rank in range(3)]
    file = io.BytesIO()
    used = []
    for rank in range(3):
        used += shards[rank][:2]
        file = io.BytesIO()
        torch.save({"shard": shards[rank], "yielded": 2}, file)  # Each over what was there.
    for _ in range(3):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        used += state["shard"][state["yielded"] :]
    assert Counter(used)[8] == 3 and not {6, 7, 9, 10} & set(used)
    ours = our_stream(3, first=0, steps=2, length=12, total=3) + our_stream(3, first=2, steps=2, length=12, total=3)
    assert sorted(ours) == list(range(12))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_evaluation_repeats_no_sample(world: int) -> None:
    """torch's DistributedSampler gives some of 7 samples twice, so that all ranks have equally many."""
    data = list(range(7))
    usual = [
        index
        for rank in range(world)
        for index in DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    ]
    assert len(usual) == -(-7 // world) * world and set(usual) == set(data)
    ours = [
        index
        for rank in range(world)
        for wanted in loading.evaluation_lists(7, micro=2, world=world, rank=rank)
        for index in wanted.ids
    ]
    assert ours == data
