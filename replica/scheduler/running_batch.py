"""Sequences that hold a place: in order of arrival, each with a lane that is its own while it runs."""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush

from replica.scheduler.decode_rows import by_arrival
from replica.scheduler.sequence import Sequence, SequenceStatus


class RunningBatch:
    """`running`: may be planned, oldest arrival first. `ending`: their last token is in flight; they hold blocks, but
    their place and lane are free already. `left`: lanes given back that no plan has told the model about yet.
    `departed`: who has left `running` since a plan last asked. `num_departures` counts who left the batch."""

    def __init__(self, num_lanes: int) -> None:
        self.running: list[Sequence] = []
        self.ending: dict[int, Sequence] = {}
        self.left: list[int] = []
        self.departed: set[Sequence] = set()
        self.num_departures = 0
        self._num_lanes = num_lanes
        self._free_lanes = list(range(num_lanes))
        heapify(self._free_lanes)
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.ending)

    def join(self, seq: Sequence) -> None:
        self._num_admissions += 1
        seq.admission = self._num_admissions
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=by_arrival)

    def take_lane(self, seq: Sequence) -> None:
        seq.lane = heappop(self._free_lanes)

    def remove(self, leaving: list[Sequence]) -> None:
        """These leave the batch (their new status is the caller's to set)."""
        self.num_departures += len(leaving)
        still_running = [seq for seq in leaving if self.ending.pop(seq.seq_id, None) is None]
        self._drop(still_running)
        for seq in still_running:
            self._give_back_lane(seq)
        for seq in leaving:
            seq.admission = 0
            seq.lane = -1
            seq.announced = False

    def begin_ending(self, seqs: list[Sequence]) -> None:
        """Their last possible token is in flight now. They remember the lane that others may take."""
        self._drop(seqs)
        for seq in seqs:
            self._give_back_lane(seq)
            seq.status = SequenceStatus.ENDING
            self.ending[seq.seq_id] = seq

    def revive(self, seq: Sequence) -> None:
        """The step that was to end it didn't happen: it runs again, in the same stay, and in the same lane unless a
        later plan, rolled back before, gave the lane away (then nothing is in flight that depends on it)."""
        del self.ending[seq.seq_id]
        if seq.lane in self._free_lanes:
            self._free_lanes.remove(seq.lane)
            heapify(self._free_lanes)
            self.left.remove(seq.lane)
        else:
            seq.lane = -1
            seq.announced = False
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=by_arrival)

    def check(self) -> None:
        """Raises AssertionError unless order, status and lanes are consistent."""
        arrivals = [seq.arrival for seq in self.running]
        assert arrivals == sorted(set(arrivals)), "running sequences are out of order"
        assert all(seq.status is SequenceStatus.RUNNING and seq.admission for seq in self.running)
        assert all(seq.status is SequenceStatus.ENDING for seq in self.ending.values())
        lanes = [seq.lane for seq in self.running if seq.lane >= 0] + self._free_lanes
        assert sorted(lanes) == list(range(self._num_lanes)), "lanes are lost or shared"

    def _drop(self, seqs: list[Sequence]) -> None:
        self.departed.update(seqs)
        if len(seqs) == 1:
            self.running.remove(seqs[0])
        elif seqs:
            gone = set(seqs)
            self.running = [seq for seq in self.running if seq not in gone]

    def _give_back_lane(self, seq: Sequence) -> None:
        if seq.lane >= 0:
            heappush(self._free_lanes, seq.lane)
            self.left.append(seq.lane)
