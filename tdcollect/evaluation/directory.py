"""Writing the directory of an evaluation: a journal first, the ledger and its report last.

``manifest.json`` is written first: it marks a directory as an evaluation's, and a directory
without it is left alone. ``episodes.jsonl`` gets one line per episode as they end, and is sorted by
index at the end. ``results.json`` is written last, and marks the evaluation as finished; a shard
has ``shard.json`` in its place. Whenever a process dies, the same command resumes after the last
complete line, and the files are byte for byte those of a run that was never interrupted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect import files, keys
from tdcollect.display import without_process_ids
from tdcollect.evaluation import ledger, step_files
from tdcollect.evaluation.episodes.data import disagreements, utf8
from tdcollect.packages import extra_module

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tdcollect.evaluation.episodes.data import Finished, Steps


class Directory:
    """The directory of one evaluation, open for writing by one process.

    Episodes that are recorded as lost are forgotten, and run again, unless ``retry_lost`` is False.

    Attributes:
        manifest: the manifest found there, or written.
        shard: the shard that runs there, or None.
        episodes: the records found there.
        kept: the digests of the files with data, by name, as a finished ledger lists them.
        rechecked: True if an episode ran once more there; None if it was unfinished.
        witness: the episode that whoever goes on here runs again first; None if there is none yet.
        was_finished: whether an evaluation or a shard was found there that had ended.
        begun: whether it may be written to, since :meth:`begin`; then it has ``steps``.
        is_tried: whether records count: there were some before, or the trial of the env is over.

    Raises:
        ValueError: for a directory of another evaluation or shard, or of something else.
        RuntimeError: if another process writes to it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        shard: ledger.Shard | None = None,
        retry_lost: bool = True,
    ):
        self.path, self.shard = Path(os.path.abspath(path)), shard
        self._made = not self.path.exists()
        self.begun = self.is_tried = False
        with ExitStack() as opened:
            opened.enter_context(files.locked(self.path))
            if not (self.path / ledger.MANIFEST).exists():
                check_directory(self.path)
                files.write_json(self.path / ledger.MANIFEST, manifest)
            self._before = before = ledger.read_directory(self.path)
            self.manifest, self.episodes = before.manifest, before.episodes
            self.kept, self.rechecked = before.kept, before.rechecked
            self.was_finished = before.last is not None
            self._check_manifest(manifest)
            self._check_shard(before)
            files.check_no_links(
                self.path,
                ledger.EPISODES,
                ledger.TRAJECTORIES,
                step_files.STEPS,
                step_files.WITNESS,
            )
            data = ledger.kept_trajectories(self.path) if self.kept is None else frozenset()
            for episode in self.episodes:
                if episode.index in data:  # of a run that was interrupted: a digest is to come
                    check_data(self.path, episode, self.manifest, None)
            for problem in step_files.altered(before):
                raise ValueError(f"{problem}; ask for it as it was, or evaluate again elsewhere")
            self.witness = step_files.read_witness(self.path)
            self._gone = self._to_forget(retry_lost)
            self.episodes = [one for one in self.episodes if one.index not in self._gone]
            self._opened = opened.pop_all()

    def _to_forget(self, lost: bool) -> set[int]:
        """The indices of records that are there, and of episodes that run all the same."""
        batches = ledger.Batches.of(self.manifest)
        gone = {episode.index for episode in self.episodes if episode.lost and lost}
        if batches is not None:
            gone |= batches.partial(episode.index for episode in self.episodes)
        return gone

    def begin(self) -> None:
        """Begin to write: what an earlier run left in part is removed, and the journal opened.

        Nothing changes before, so that whoever finds the directory can look at it first.
        """
        if self.shard is not None and self._before.shard is None:
            files.write_json(self.path / ledger.SHARD, {"shard": self.shard})
        if self._gone:
            self._forget()
        self._sweep()
        self.steps = step_files.Journal(self.path)
        self._journal = self._opened.enter_context((self.path / ledger.EPISODES).open("a+b"))
        self._opened.callback(self.steps.close)
        size = sum(map(len, ledger.complete_lines(self.path / ledger.EPISODES)))
        if self._journal.tell() > size:  # a process died as it wrote a line
            self._journal.truncate(size)
            self._journal.seek(size)
        self.is_tried = bool(size)
        self.begun = True

    def _check_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Refuse to go on from the manifest found there if it is of another evaluation."""
        if unlike := ledger.differences(self.manifest, manifest):
            raise ValueError(
                f"{self.path} holds another evaluation: {ledger.differences_text(unlike)}. Choose "
                "another directory, or remove this one to start again"
            )

    def _check_shard(self, before: ledger.Files) -> None:
        """Refuse a directory of another shard, or of the whole."""
        self._was_shard = self.shard is None and before.shard is not None
        if self.shard is None:
            return
        there = None if before.shard is None else str(before.shard)
        if there is None and before.last is not None:
            there = "the whole evaluation"
        elif there is None and self.episodes:  # a process may have died before it marked it
            own = {*self.shard.select(ledger.asked_indices(self.manifest))}
            other = [episode.index for episode in self.episodes if episode.index not in own]
            there = f"episode {other[0]}, which is not of this shard" if other else None
        if there not in (None, str(self.shard)):
            raise ValueError(
                f"expected {self.path} to hold {self.shard} or nothing, got {there}; choose a "
                "directory of its own for each shard, or run without shard, which goes on with "
                "the whole evaluation there"
            )

    def _unmark(self) -> None:
        """Go on with the whole evaluation where a shard was, once something is written."""
        if self._was_shard:
            files.remove(self.path / ledger.SHARD)
            self._was_shard = False

    def _forget(self) -> None:
        """Forget some episodes; first, that the evaluation or the shard is finished."""
        self._unmark()
        files.remove(self.path / ledger.RESULTS)
        if self.shard is not None:
            files.write_json(self.path / ledger.SHARD, {"shard": self.shard})
        self._write_ledger(self.episodes)

    def cut(self, episodes: Iterable[ledger.Episode], manifest: dict[str, Any]) -> None:
        """Keep these episodes alone, all that a manifest asks for, which is the one from then on.

        A process may die between the two files: the ledger is then that of an unfinished run.
        """
        by_index = {episode.index: episode for episode in episodes}
        self._write_ledger(by_index[index] for index in sorted(by_index))
        for index in ledger.kept_trajectories(self.path) - by_index.keys():
            ledger.trajectory_path(self.path, index).unlink()
        self.manifest = manifest
        files.write_json(self.path / ledger.MANIFEST, self.manifest)

    def note(self, entries: Mapping[str, Any]) -> None:
        """Add entries to the manifest that are known once episodes run."""
        self.manifest.update(entries)
        files.write_json(self.path / ledger.MANIFEST, self.manifest)

    def keep_witness(self, witness: Finished) -> None:
        """Write the episode that whoever goes on here runs again first."""
        self.witness = witness
        step_files.write_witness(self.path, witness)

    def _sweep(self, data: bool = False) -> None:
        """Remove half-written data; with ``data``, all data of episodes."""
        for ending in (".npz.part", ledger.KEPT)[: 1 + data]:
            for index in ledger.kept_trajectories(self.path, ending=ending):
                (self.path / ledger.TRAJECTORIES / f"{ledger.episode_name(index)}{ending}").unlink()

    def check_kept(self, episodes: Iterable[ledger.Episode]) -> None:
        """Refuse to keep data if some episodes have ended without."""
        there = ledger.kept_trajectories(self.path)
        lacking = [one.index for one in episodes if one.completed and one.index not in there]
        if lacking:
            raise ValueError(
                f"expected the data of the episodes that {self.path} holds, got {len(lacking)} "
                f"without (episode {lacking[0]} first): data are kept as an episode runs. Evaluate "
                "into another directory, or replay single episodes"
            )

    def add(
        self, episode: ledger.Episode, data: TensorDict | None = None, steps: Steps | None = None
    ) -> None:
        """Write an episode: its data and its steps first, then its line."""
        if steps is not None:
            self.steps.add(episode.index, steps)
        path = ledger.trajectory_path(self.path, episode.index)
        if data is None:
            path.unlink(missing_ok=True)  # its line was never written
        else:
            write_trajectory(path, data)
        self._unmark()
        with files.naming(self.path / ledger.EPISODES):
            self._journal.write(episode.to_json().encode() + b"\n")
            self._journal.flush()

    def finish(self, episodes: Sequence[ledger.Episode]) -> None:
        """Write the ledger again, with its records by index, as they are given."""
        if self.shard is None:
            files.remove(self.path / ledger.SHARD)  # and what a process that was killed left of it
        self.steps.pack(episode.index for episode in episodes if episode.completed)
        self._write_ledger(episodes)

    def _write_ledger(self, episodes: Iterable[ledger.Episode]) -> None:
        lines = (episode.to_json().encode() + b"\n" for episode in episodes)
        files.write_atomically(self.path / ledger.EPISODES, lambda file: file.writelines(lines))

    def write_results(self, **results: Any) -> None:
        """Write the statistics and digests of the other files, which finishes the evaluation."""
        files.write_json(self.path / ledger.RESULTS, {**self._digests(), **results})

    def finish_shard(self, **note: Any) -> None:
        """Write the digests of ledger and manifest, which finishes the shard, and a note."""
        files.write_json(self.path / ledger.SHARD, {**note, **self._digests(), "shard": self.shard})

    def _digests(self) -> dict[str, Any]:
        """Return the digests of ledger, manifest, and all data, if there are any.

        Those of data that a finished ledger lists stay, as the data may have been altered since.
        """
        before = [] if self.kept is None else self.episodes
        new = ledger.kept_trajectories(self.path) - {episode.index for episode in before}
        paths = [ledger.trajectory_path(self.path, index) for index in sorted(new)]
        data = (self.kept or {}) | {path.name: ledger.sha256(path) for path in paths}
        digests: dict[str, Any] = {
            name: ledger.sha256(self.path / file) for name, file in ledger.DIGESTED.items()
        }
        digests |= {ledger.TRAJECTORIES: data} if data else {}
        steps = step_files.digests(self.path)
        digests |= {step_files.STEPS: steps} if steps else {}
        witness = self.path / step_files.WITNESS
        return {**digests, "witness": ledger.sha256(witness) if witness.exists() else None}

    def note_run(self, started: float, ran: int, how: Mapping[str, Any]) -> None:
        """Append the times of this run to the one file that holds times."""
        seconds = round(time.time() - started, 3)
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        run = {"began": began, "seconds": seconds, "episodes": ran, **how}
        files.write_json(self.path / ledger.RUN, [*read_runs(self.path), run])

    def give_up(self, error: BaseException) -> None:
        """Remove the files if no episode has ever counted; mark a refused evaluation as refused.

        None counts before the trial of the env has ended well, if this run was the first one here.
        """
        from tdcollect.randomness import NotReproducibleError  # which needs torch; reading does not

        is_refused = isinstance(error, NotReproducibleError)
        if not self.begun:
            if self._made and {*os.listdir(self.path)} <= {ledger.MANIFEST, files.LOCK}:
                (self.path / ledger.MANIFEST).unlink()
                self.close()
                with suppress(OSError):  # of what another process has put there since
                    self.path.rmdir()
            return
        counted = self._journal.tell() and (self.is_tried or not is_refused)
        if not counted and not (self.path / ledger.RUN).exists():
            self._sweep(data=True)
            self.steps.remove()
            files.remove(self.path / ledger.SHARD)
            for name in (ledger.EPISODES, ledger.MANIFEST):
                (self.path / name).unlink()
            ends = [(self.path / ledger.TRAJECTORIES).rmdir, self.close, self.path.rmdir]
            for end in ends if self._made else ends[:2]:
                with suppress(OSError):  # of what is not ours there; of a journal on a full disk
                    end()
        elif is_refused:
            reason = without_process_ids(str(error))
            files.write_json(self.path / ledger.REFUSED, {"reason": reason})

    def close(self) -> None:
        """Release the directory."""
        with files.naming(self.path / ledger.EPISODES):  # of which a full disk left a part to write
            self._opened.close()


def check_report_extras(what: str) -> None:
    """Raise before anything runs if the report, which the call ``what`` writes, lacks packages."""
    extra_module("scipy", what)


def check_directory(path: Path) -> None:
    """Refuse a path that neither holds nor can become an evaluation."""
    if (path / ledger.MANIFEST).exists():
        files.check_writable(path)
        ledger.read_manifest(path)
    else:  # a process may have died as it wrote the first file
        files.check_output(path, "an evaluation", (ledger.MANIFEST,))


def read_runs(path: Path) -> list[Any]:
    """Read the entries of the file of times, one per run; empty if there is none."""
    file = path / ledger.RUN
    advice = "remove the file: all others are written"
    runs: list[Any] = ledger.read_json(file, list, advice) if file.exists() else []
    return runs


_BRAIN = "bfloat16:"  # before the name of an entry that NumPy has no dtype for
_BFLOAT16 = np.dtype(np.uint16, metadata={"is": "bfloat16"})
_TEXT = "utf8:"  # likewise: rows of bytes, filled up with one that UTF-8 does not have
_FILL = b"\xff"


def write_trajectory(path: Path, data: TensorDict) -> None:
    """Write the data ``[L]`` of an episode as a file of arrays, by the names of entries."""
    import torch
    from tensordict import is_non_tensor

    arrays = {}
    for key, value in data.items(True):
        if is_non_tensor(value):
            texts = [utf8(text) for text in value.tolist()]
            width = max(map(len, texts))
            filled = b"".join(text.ljust(width, _FILL) for text in texts)
            rows = np.frombuffer(filled, np.uint8).reshape(len(texts), width)
            arrays[_TEXT + step_files.member_name(key)] = rows
        if not isinstance(value, torch.Tensor):
            continue
        name = step_files.member_name(key)
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            name, tensor = _BRAIN + name, tensor.view(torch.uint16)
        try:
            arrays[name] = tensor.numpy()
        except TypeError as error:
            error.add_note(f"in {key!r}: convert what NumPy has no dtype for, or keep no data")
            raise
    step_files.write_arrays(path, dict(sorted(arrays.items())))


def read_trajectory(path: Path) -> Any:
    """Read the data ``[L]`` of an episode that :func:`write_trajectory` wrote, as a TensorDict.

    No code is run, whatever the file holds. Where tensordict is not installed, they are arrays in
    nested dicts.
    """
    if find_spec("tensordict") is None or find_spec("torch") is None:
        return keys.by_name(read_entries(path).items())
    import torch
    from tensordict import NonTensorStack, TensorDict

    entries: dict[keys.Key, Any] = {}
    for key, array in read_entries(path).items():
        if array.dtype == object:
            entries[key] = NonTensorStack(*array)
            continue
        tensor = torch.from_numpy(array)
        entries[key] = tensor.view(torch.bfloat16) if array.dtype.metadata else tensor
    data = TensorDict(keys.by_name(entries.items()), [len(array)], device="cpu")
    return data.refine_names(keys.TIME)


def read_entries(path: Path) -> dict[keys.Key, np.ndarray[Any, Any]]:
    """Read the entries ``[L, ...]`` of an episode by key.

    ``bfloat16``, which NumPy lacks, is read as the ``uint16`` of the same bits; texts as objects.
    """
    try:
        entries: dict[keys.Key, np.ndarray[Any, Any]] = {}
        for name, array in step_files.read_arrays(path).items():
            key = step_files.key_of(name.removeprefix(_BRAIN).removeprefix(_TEXT))
            is_brain, is_text = name.startswith(_BRAIN), name.startswith(_TEXT)
            fits = array.dtype == np.uint16 if is_brain else array.dtype.isnative
            fits = array.dtype == np.uint8 and array.ndim == 2 if is_text else fits
            if not fits or not array.ndim or key in entries:
                raise ValueError(f"{name} is {array.dtype} {[*array.shape]}, or there twice")
            entries[key] = array.view(_BFLOAT16) if is_brain else array
            if is_text:
                texts = (row.tobytes().rstrip(_FILL) for row in array)
                decoded = [text.decode("utf-8", "surrogatepass") for text in texts]
                entries[key] = np.array(decoded, object)
        if len({len(array) for array in entries.values()}) != 1:
            raise ValueError("its entries have no length in common")
        paths = [keys.as_path(key) for key in entries]
        around = {path[:depth] for path in paths for depth in range(1, len(path))}
        if both := around.intersection(paths):
            raise ValueError(f"{keys.entry_path(min(both))} is an entry, and has entries within")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the data of an episode as an evaluation keeps them: {error}; "
            "remove the file, and run the episode again with replay()"
        ) from error
    return entries


def check_data(
    root: Path,
    record: ledger.Episode,
    manifest: Mapping[str, Any],
    listed: Mapping[str, str] | None,
    folder: str = ledger.TRAJECTORIES,
) -> dict[str, np.ndarray[Any, Any]]:
    """Check the data ``[L]`` that were kept of an episode against its record; return them by path.

    ``listed`` are the digests of files; those of a film, in another ``folder``, have none.
    """
    path = ledger.trajectory_path(root, record.index, folder)
    entries = read_entries(path)
    data = {keys.entry_path(key): rows for key, rows in entries.items()}
    try:
        counted = (manifest.get("returns") or {}).get("rewards")
        wrong = disagreements(record, data, manifest["entries"], counted)
    except (TypeError, ValueError) as error:  # of a dtype or a shape that no episode has
        wrong = [str(error)]
    if listed is not None and (now := ledger.sha256(path)) != listed.get(path.name):
        then = listed.get(path.name, "none")
        wrong.append(
            f"the digest of their file is {now}, in {ledger.RESULTS} or {ledger.SHARD} {then}"
        )
    if wrong:
        raise ValueError(
            f"the data kept of episode {record.index} are not those of its record: "
            f"{'; '.join(wrong)}. Run the episode again instead: replay({record.index})"
        )
    return data
