"""Which physical slot should hold which expert, by how many tokens experts got: numpy, on the host.

The idea is DeepSeek-V3's (arXiv 2412.19437, section 3.4): heavily loaded experts have replicas, and
experts are arranged so that ranks have about equal loads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def choose_placement(tokens_per_expert: npt.ArrayLike, slots: int, ranks: int) -> np.ndarray:
    """A placement by which ranks have about equal loads, where an expert's tokens are shared out
    evenly among its physical slots, as :func:`place` does.

    Two greedy steps:

    1. Each expert has one physical slot. The others go, one at a time, to the expert whose slots
       have the largest load each.
    2. From the largest load of a slot down, a slot goes to the rank with the smallest load that has
       room; if several have it, to one without a slot of this expert.

    If no rank's load is larger when experts lie in order, as many on each rank, then they do, each
    rank's further slots hold its own experts, and nothing need move. So the largest load of a rank
    is never larger than without a placement. Equal arguments give equal placements.

    Args:
      tokens_per_expert: [..., E], not negative: how many tokens chose each expert, such as
        ``MixtureOutput.tokens_per_expert``, perhaps summed over steps, or for several layers
        stacked.
      slots: S, physical slots of all ranks together, at least E.
      ranks: M, a divisor of S; rank r has the S / M slots from ``r S / M`` on.

    Returns:
      i32 [..., S]: the expert of each physical slot, ascending on each rank. Each expert has one.

    Raises:
      ValueError: arguments that do not fit.
    """
    op = "choose_placement"
    loads = _loads(op, tokens_per_expert)
    *layers, experts = loads.shape
    if experts < 1 or slots < experts:
        raise ValueError(f"jflux.moe.{op}: {slots=} must be at least the {experts} experts")
    if ranks < 1 or slots % ranks:
        raise ValueError(f"jflux.moe.{op}: {ranks=} must divide {slots=}")
    chosen = [_choose(layer, slots, ranks) for layer in loads.reshape(-1, experts)]
    return np.asarray(chosen, np.int32).reshape(*layers, slots)


def rank_loads(
    tokens_per_expert: npt.ArrayLike, placement: npt.ArrayLike, ranks: int
) -> np.ndarray:
    """How many tokens each rank gets where :func:`place` shares them out, for each choice once.

    ``loads.max() / loads.mean()`` says how much longer the fullest rank takes than ranks of equal
    loads would.

    Args:
      tokens_per_expert: [..., E], as in :func:`choose_placement`.
      placement: integers [..., S].
      ranks: M, a divisor of S.

    Returns:
      float64 [..., M]. What an expert without a physical slot got is in none.

    Raises:
      ValueError: arguments that do not fit.
    """
    op = "rank_loads"
    loads, places = _loads(op, tokens_per_expert), np.asarray(placement)
    if places.dtype.kind not in "iu" or places.shape[:-1] != loads.shape[:-1]:
        raise ValueError(
            f"jflux.moe.{op}: placement must be integers {[*loads.shape[:-1], 'S']}, for "
            f"tokens_per_expert {loads.shape}; got {places.dtype} {places.shape}"
        )
    if ranks < 1 or places.shape[-1] % ranks:
        raise ValueError(f"jflux.moe.{op}: {ranks=} must divide the slots of {places.shape=}")
    experts = loads.shape[-1]
    hot = places[..., None] == np.arange(experts)  # [..., S, E]
    share = loads / np.maximum(hot.sum(-2), 1)
    of_slots = np.where(hot, share[..., None, :], 0).sum(-1)
    return of_slots.reshape(*places.shape[:-1], ranks, -1).sum(-1)


def _loads(op: str, tokens_per_expert: npt.ArrayLike) -> np.ndarray:
    loads: np.ndarray = np.asarray(tokens_per_expert, np.float64)
    if loads.ndim < 1 or not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ValueError(
            f"jflux.moe.{op}: tokens_per_expert {loads.shape} must be [..., E], finite and not "
            "negative"
        )
    return loads


def _choose(loads: np.ndarray, slots: int, ranks: int) -> list[int]:
    """The placement for one layer's loads."""
    experts, each = len(loads), slots // ranks
    replicas = np.ones(experts, np.int64)
    for _ in range(slots - experts):
        _add_replica(loads, replicas)
    greedy = _packed(loads / replicas, replicas, ranks, each)
    if experts % ranks:
        return greedy
    in_order = _in_order(loads, ranks, each)
    largest = [rank_loads(loads, one, ranks).max() for one in (in_order, greedy)]
    return in_order if largest[0] <= largest[1] else greedy


def _add_replica(loads: np.ndarray, replicas: np.ndarray) -> None:
    """One more for the expert with the largest load of a slot; of equal ones for that with the
    fewest, and then for the first."""
    share = loads / replicas
    replicas[np.lexsort((replicas, -share))[0]] += 1


def _packed(share: np.ndarray, replicas: np.ndarray, ranks: int, each: int) -> list[int]:
    """Slots of such loads on ranks."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(replicas[expert]):
            open_ranks = (rank for rank in range(ranks) if len(held[rank]) < each)
            rank = min(open_ranks, key=lambda r: (load[r], expert in held[r], r))
            held[rank].append(expert)
            load[rank] += share[expert]
    return [expert for those in held for expert in sorted(those)]


def _in_order(loads: np.ndarray, ranks: int, each: int) -> list[int]:
    """Each rank's experts as without a placement, and replicas of them in the slots left over."""
    own = len(loads) // ranks
    found: list[int] = []
    for rank in range(ranks):
        replicas = np.ones(own, np.int64)
        for _ in range(each - own):
            _add_replica(loads[rank * own : (rank + 1) * own], replicas)
        found += np.repeat(np.arange(rank * own, (rank + 1) * own), replicas).tolist()
    return found
