"""Compiled inner loops of the local search. Import this module only where it is called: it loads numba.

Operators are numbered by their position in the default order, so that operator t first runs in stage t; operator n is
no real one, it ends the last stage and reads what must be alive at the end. A computation is a *node*: nodes 0..n are
the first computations, later ones the recomputations, taken from a pool. Each node hangs in two sorted lists, that of
its operator (by stage) and that of its stage (by operator), so that a stage is its recomputations in topological order
and then its first computation.

A computation makes one *copy* of each output; `until[node, slot]` is the last stage that reads the copy, or -1. A copy
is read by every computation of a reader from its own stage until its producer runs again. Held values are the
exception: the copy made last before the loss stays to the end, and a later one is only alive while its operator runs.

Memory is kept per stage: `peak[t]` is the most that is alive while stage t lasts, `inside[t]` how much of that comes on
top of what is alive when it begins. `add` and `remove` are exact and undo each other; they leave the stages whose
inside changed on a list, which `settle` goes through once per move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Columns of `State.nodes`.
STAGE, OP, OP_PREV, OP_NEXT, STAGE_PREV, STAGE_NEXT, PLACE = range(7)
NODE_COLUMNS = 7
# Entries of `State.counters`.
RECOMPUTED, COST, EXCESS, DIRTY, STAMP, JOURNAL, BEST_COST, BEST_COUNT, FEASIBLE_MOVES = range(9)
COUNTERS = 9
# Entries of `State.levels`.
TEMPERATURE, WEIGHT, COST_LIMIT = range(3)
LEVELS = 3

NO_BEST = np.int64(2**62)
REMOVING, ADDING = np.int64(0), np.int64(1)  # in the journal
JOURNAL_ROWS = 4096
STACK_ROWS = 1024
_EARLY_ONE_IN = 8  # evictions: what is evicted is computed again some time before its next use


# Called from compiled code only, on arrays that the caller holds, so that nothing is gained by counting references.
inner = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)
outer = njit(cache=True, nogil=True, no_cfunc_wrapper=True)


class Model(NamedTuple):
    """The problem. Lists are compressed rows: the list of i is `x[x_ptr[i]:x_ptr[i + 1]]`."""

    inputs_ptr: np.ndarray
    inputs: np.ndarray
    outputs_ptr: np.ndarray
    outputs: np.ndarray
    users_ptr: np.ndarray
    users: np.ndarray
    producer: np.ndarray  # per value
    slot: np.ndarray  # per value, its place among its producer's outputs
    size: np.ndarray  # per value, bytes
    held_from: np.ndarray  # per value, the last stage whose copy can be replaced: the loss for held values, else n
    workspace: np.ndarray  # per operator, bytes
    cost: np.ndarray  # per operator, integer units of time, so that undoing is exact
    first_stage: np.ndarray  # per operator, the first stage in which it may run again
    last_stage: np.ndarray  # and the last
    budget: np.ndarray  # one entry, bytes beside what is resident


class State(NamedTuple):
    """Where the search is. All entries change in place."""

    nodes: np.ndarray
    until: np.ndarray
    pool: np.ndarray  # the recomputations in use, then the free nodes
    peak: np.ndarray  # per stage, bytes
    inside: np.ndarray  # per stage, its peak less what is alive when it begins
    dirty: np.ndarray  # stages to settle
    is_dirty: np.ndarray
    mark: np.ndarray  # per value
    journal: np.ndarray  # (stage, operator, REMOVING or ADDING) of the current move
    stack: np.ndarray
    best: np.ndarray  # (stage, operator) of the best set within the budget
    counters: np.ndarray
    levels: np.ndarray
    random: np.ndarray


@inner
def draw(random, bound):
    """A whole number from 0 to bound - 1 (xorshift). A literal bound would be compiled once more for each value."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return (np.int64(x >> np.uint64(33)) * bound) >> 31


@inner
def chance(random):
    """A number from 0 up to 1."""
    return draw(random, np.int64(1 << 30)) / (1 << 30)


@inner
def copy_at(nodes, producer, held_from, value, stage):
    """The node whose copy of `value` is the one to read in `stage`."""
    limit = min(stage, held_from[value])
    node = producer[value]
    following = nodes[node, OP_NEXT]
    while following >= 0 and nodes[following, STAGE] <= limit:
        node = following
        following = nodes[node, OP_NEXT]
    return node


@inner
def last_read(nodes, users_ptr, users, value, first, end):
    """The last stage in [first, end) that reads `value`, or -1."""
    latest = -1
    for i in range(users_ptr[value], users_ptr[value + 1]):
        node = users[i]
        while node >= 0 and nodes[node, STAGE] < end:
            if nodes[node, STAGE] > latest:
                latest = nodes[node, STAGE]
            node = nodes[node, OP_NEXT]
    return latest if latest >= first else -1


@inner
def next_read(nodes, users_ptr, users, value, after, none):
    """The first stage later than `after` that reads `value`, or `none`."""
    first = none
    for i in range(users_ptr[value], users_ptr[value + 1]):
        node = users[i]
        while node >= 0:
            stage = nodes[node, STAGE]
            if stage > after:
                first = min(first, stage)
                break
            node = nodes[node, OP_NEXT]
    return first


@inner
def shift(peak, counters, budget, first, last, change):
    """Add `change` bytes to what is alive at the start of stages first..last."""
    excess = 0
    peaks = peak[first : last + 1]  # a slice, and loops from 0, so that the compiler can use vector instructions
    for i in range(len(peaks)):
        before = peaks[i] - budget
        after = before + change
        peaks[i] += change
        excess += max(after, 0) - max(before, 0)
    counters[EXCESS] += excess


@inner
def touch(dirty, is_dirty, counters, stage):
    """Put `stage` on the list of stages to settle."""
    if not is_dirty[stage]:
        is_dirty[stage] = True
        dirty[counters[DIRTY]] = stage
        counters[DIRTY] += 1


@inner
def settle(m, s):
    """Find the peaks of the stages on the list again, walking each from its end to its start."""
    budget = m.budget[0]
    for place in range(s.counters[DIRTY]):
        stage = np.int64(s.dirty[place])
        s.is_dirty[stage] = False
        s.counters[STAMP] += 1
        stamp = s.counters[STAMP]
        memory = 0  # beside what is alive when the stage ends
        most = 0
        node = np.int32(stage)
        while node >= 0:
            op = s.nodes[node, OP]
            made = 0
            doubled = 0
            first = m.outputs_ptr[op]
            for i in range(first, m.outputs_ptr[op + 1]):
                value = m.outputs[i]
                if stage > m.held_from[value]:
                    doubled += m.size[value]  # the copy of the time of the loss is alive beside this one
                    continue
                made += m.size[value]
                if s.until[node, i - first] <= stage and s.mark[value] != stamp:
                    memory += m.size[value]
            for i in range(m.inputs_ptr[op], m.inputs_ptr[op + 1]):
                value = m.inputs[i]
                if s.mark[value] != stamp:
                    s.mark[value] = stamp
                    if s.until[copy_at(s.nodes, m.producer, m.held_from, value, stage), m.slot[value]] <= stage:
                        memory += m.size[value]
            most = max(most, memory + m.workspace[op] + doubled)
            memory -= made
            node = s.nodes[node, STAGE_PREV]
        before = s.peak[stage]
        after = before - s.inside[stage] + most - memory
        s.peak[stage] = after
        s.inside[stage] = most - memory
        s.counters[EXCESS] += max(after - budget, 0) - max(before - budget, 0)
    s.counters[DIRTY] = 0


@inner
def link(nodes, pool, counters, stage, op):
    """Take a node from the pool and hang it into both lists."""
    node = pool[counters[RECOMPUTED]]
    nodes[node, PLACE] = counters[RECOMPUTED]
    counters[RECOMPUTED] += 1
    nodes[node, STAGE] = stage
    nodes[node, OP] = op
    before = np.int32(op)
    following = nodes[before, OP_NEXT]
    while following >= 0 and nodes[following, STAGE] < stage:
        before = following
        following = nodes[before, OP_NEXT]
    nodes[before, OP_NEXT] = node
    nodes[node, OP_PREV] = before
    nodes[node, OP_NEXT] = following
    if following >= 0:
        nodes[following, OP_PREV] = node
    following = np.int32(stage)
    before = nodes[following, STAGE_PREV]
    while before >= 0 and nodes[before, OP] > op:
        following = before
        before = nodes[following, STAGE_PREV]
    nodes[following, STAGE_PREV] = node
    nodes[node, STAGE_NEXT] = following
    nodes[node, STAGE_PREV] = before
    if before >= 0:
        nodes[before, STAGE_NEXT] = node
    return node


@inner
def unlink(nodes, pool, counters, node):
    """Take a node out of both lists, back to the pool."""
    before, following = nodes[node, OP_PREV], nodes[node, OP_NEXT]
    nodes[before, OP_NEXT] = following
    if following >= 0:
        nodes[following, OP_PREV] = before
    before, following = nodes[node, STAGE_PREV], nodes[node, STAGE_NEXT]
    nodes[following, STAGE_PREV] = before
    if before >= 0:
        nodes[before, STAGE_NEXT] = following
    counters[RECOMPUTED] -= 1
    place, last = nodes[node, PLACE], pool[counters[RECOMPUTED]]
    pool[place] = last
    nodes[last, PLACE] = place
    pool[counters[RECOMPUTED]] = node


@inner
def add(m, s, stage, op):
    """Compute `op` again in `stage`, where it is not yet. Returns its node."""
    node = link(s.nodes, s.pool, s.counters, stage, op)
    earlier = s.nodes[node, OP_PREV]
    born = np.int64(s.nodes[earlier, STAGE])
    first = m.outputs_ptr[op]
    for i in range(first, m.outputs_ptr[op + 1]):
        value = m.outputs[i]
        end = s.until[earlier, i - first]
        s.until[node, i - first] = -1
        if end < stage or stage > m.held_from[value]:
            continue
        s.until[node, i - first] = end  # the reads from here on are of the new copy
        read = last_read(s.nodes, m.users_ptr, m.users, value, born, stage)
        s.until[earlier, i - first] = read
        shift(s.peak, s.counters, m.budget[0], max(read, born) + 1, stage, -m.size[value])
        touch(s.dirty, s.is_dirty, s.counters, max(read, born))
    for i in range(m.inputs_ptr[op], m.inputs_ptr[op + 1]):
        value = m.inputs[i]
        source, slot = copy_at(s.nodes, m.producer, m.held_from, value, stage), m.slot[value]
        if s.until[source, slot] < stage:
            end = np.int64(max(s.until[source, slot], s.nodes[source, STAGE]))
            s.until[source, slot] = stage
            shift(s.peak, s.counters, m.budget[0], end + 1, stage, m.size[value])
            touch(s.dirty, s.is_dirty, s.counters, end)
    touch(s.dirty, s.is_dirty, s.counters, stage)
    s.counters[COST] += m.cost[op]
    return node


@inner
def remove(m, s, node):
    """Leave out one recomputation: what read its outputs reads the copies before."""
    stage, op, earlier = np.int64(s.nodes[node, STAGE]), s.nodes[node, OP], s.nodes[node, OP_PREV]
    unlink(s.nodes, s.pool, s.counters, node)
    for i in range(m.inputs_ptr[op], m.inputs_ptr[op + 1]):
        value = m.inputs[i]
        source, slot = copy_at(s.nodes, m.producer, m.held_from, value, stage), m.slot[value]
        if s.until[source, slot] == stage:
            read = last_read(s.nodes, m.users_ptr, m.users, value, np.int64(s.nodes[source, STAGE]), stage + 1)
            s.until[source, slot] = read
            end = max(read, s.nodes[source, STAGE])
            shift(s.peak, s.counters, m.budget[0], end + 1, stage, -m.size[value])
            touch(s.dirty, s.is_dirty, s.counters, end)
    first = m.outputs_ptr[op]
    for i in range(first, m.outputs_ptr[op + 1]):
        value = m.outputs[i]
        if s.until[node, i - first] >= 0:
            end = np.int64(max(s.until[earlier, i - first], s.nodes[earlier, STAGE]))
            s.until[earlier, i - first] = s.until[node, i - first]
            shift(s.peak, s.counters, m.budget[0], end + 1, stage, m.size[value])
            touch(s.dirty, s.is_dirty, s.counters, end)
    touch(s.dirty, s.is_dirty, s.counters, stage)
    s.counters[COST] -= m.cost[op]


@inner
def node_at(nodes, stage, op):
    """The node of `op` in `stage`, or -1."""
    node = np.int32(op)
    while node >= 0 and nodes[node, STAGE] < stage:
        node = nodes[node, OP_NEXT]
    return node if node >= 0 and nodes[node, STAGE] == stage else np.int32(-1)


@inner
def write_down(journal, counters, stage, op, adding):
    """Note for `undo` that `op` is about to be added to `stage` or removed from it."""
    row = counters[JOURNAL]
    journal[row, 0] = stage
    journal[row, 1] = op
    journal[row, 2] = adding
    counters[JOURNAL] = row + 1


@inner
def undo(m, s):
    """Take the current move back, step by step."""
    for row in range(s.counters[JOURNAL] - 1, -1, -1):
        stage, op = np.int64(s.journal[row, 0]), s.journal[row, 1]
        if s.journal[row, 2]:
            remove(m, s, node_at(s.nodes, stage, op))
        else:
            add(m, s, stage, op)
    s.counters[JOURNAL] = 0
    settle(m, s)


@inner
def is_unread(nodes, until, outputs_ptr, node):
    """Whether `node` is a recomputation whose outputs nobody reads."""
    if node < len(outputs_ptr) - 1:
        return False
    op = nodes[node, OP]
    latest = -1
    for slot in range(outputs_ptr[op + 1] - outputs_ptr[op]):
        latest = max(latest, until[node, slot])
    return latest < 0


@inner
def prune(m, s, node):
    """Remove `node`, and then what only it needed."""
    s.stack[0] = node
    height = 1
    while height > 0:
        height -= 1
        node = s.stack[height]
        stage, op = np.int64(s.nodes[node, STAGE]), s.nodes[node, OP]
        if s.counters[JOURNAL] >= JOURNAL_ROWS - 8:
            return
        write_down(s.journal, s.counters, stage, op, REMOVING)
        remove(m, s, node)
        for i in range(m.inputs_ptr[op], m.inputs_ptr[op + 1]):
            source = copy_at(s.nodes, m.producer, m.held_from, m.inputs[i], stage)
            if is_unread(s.nodes, s.until, m.outputs_ptr, source):
                waiting = False
                for j in range(height):
                    waiting |= s.stack[j] == source
                if not waiting and height < len(s.stack):
                    s.stack[height] = source
                    height += 1


@inner
def recompute(m, s, stage, op, around, deep, shallow, most):
    """Compute `op` again in `stage`, and with it inputs that are no longer there.

    An input that would have to stay alive through stage `around` is recomputed too with probability `deep`, one that
    would only have to live longer with probability `shallow`; else it is kept.
    """
    s.stack[0] = op
    height = 1
    added = 0
    while height > 0:
        height -= 1
        op = s.stack[height]
        has_room = s.counters[JOURNAL] < JOURNAL_ROWS - 8 and s.counters[RECOMPUTED] < len(s.pool) - 8
        if node_at(s.nodes, stage, op) >= 0 or not has_room:
            continue
        added += 1
        if added > most or s.counters[COST] + m.cost[op] > s.levels[COST_LIMIT]:
            s.levels[COST_LIMIT] = -1.0
            return
        for i in range(m.inputs_ptr[op], m.inputs_ptr[op + 1]):
            value = m.inputs[i]
            source = copy_at(s.nodes, m.producer, m.held_from, value, stage)
            end = max(s.until[source, m.slot[value]], s.nodes[source, STAGE])
            maker = m.producer[value]
            if end >= stage or not m.first_stage[maker] <= stage <= m.last_stage[maker] or stage > m.held_from[value]:
                continue
            if chance(s.random) < (deep if end < around else shallow) and height < len(s.stack):
                s.stack[height] = maker
                height += 1
        write_down(s.journal, s.counters, stage, op, ADDING)
        earlier = s.nodes[add(m, s, stage, op), OP_PREV]
        if is_unread(s.nodes, s.until, m.outputs_ptr, earlier):
            write_down(s.journal, s.counters, np.int64(s.nodes[earlier, STAGE]), op, REMOVING)
            remove(m, s, earlier)


@inner
def crowded_stage(peak, excess, budget, random):
    """A stage over the budget, the next from a random one on; a random stage if there is none."""
    stages = len(peak)
    start = draw(random, stages)
    if excess > 0:
        for stage in range(start, stages):
            if peak[stage] > budget:
                return stage
        for stage in range(start):
            if peak[stage] > budget:
                return stage
    return start


@inner
def evict(m, s, stage, rivals):
    """Free a value that is idle in `stage` and compute it again before its next use, as late as that is allowed.

    Of up to `rivals` candidates found at random, the one with most bytes x stages per cost. While no
    set within the budget is known it is now and then computed earlier: memory may be short just before its next use.
    """
    best_score = -1.0
    best_op = np.int32(-1)
    best_stage = np.int64(0)
    for _ in range(40):
        if rivals == 0:
            break
        value = m.outputs[draw(s.random, len(m.outputs))]
        op = m.producer[value]
        if m.last_stage[op] <= stage or op >= stage or m.size[value] == 0:
            continue
        node = copy_at(s.nodes, m.producer, m.held_from, value, stage)
        if s.until[node, m.slot[value]] <= stage or s.nodes[node, STAGE] >= stage:
            continue
        read = last_read(s.nodes, m.users_ptr, m.users, value, np.int64(s.nodes[node, STAGE]), stage + 1)
        if read == stage:
            continue
        following = min(
            next_read(s.nodes, m.users_ptr, m.users, value, stage, len(s.peak)), m.last_stage[op], m.held_from[value]
        )
        if following <= stage or following < m.first_stage[op]:
            continue
        rivals -= 1
        idle = following - max(read, s.nodes[node, STAGE])
        score = m.size[value] * idle / (m.cost[op] + 1.0)
        if score > best_score:
            best_score, best_op, best_stage = score, op, following
    if best_op < 0:
        return
    if s.counters[BEST_COST] == NO_BEST and draw(s.random, np.int64(_EARLY_ONE_IN)) == 0:
        best_stage = max(stage + 1 + draw(s.random, best_stage - stage), m.first_stage[best_op])
    deep = (0.5, 0.9, 1.0)[draw(s.random, np.int64(3))]
    shallow = (0.0, 0.3, 0.9)[draw(s.random, np.int64(3))]
    recompute(m, s, best_stage, best_op, stage, deep, shallow, 1 << draw(s.random, np.int64(9)))


@inner
def move_elsewhere(m, s, node):
    """Run a recomputation in another stage: past its first use, or where its inputs are at hand, or nearby."""
    stage, op = np.int64(s.nodes[node, STAGE]), s.nodes[node, OP]
    kind = draw(s.random, np.int64(3))
    target = stage
    if kind == 0:
        value = m.outputs[m.outputs_ptr[op] + draw(s.random, m.outputs_ptr[op + 1] - m.outputs_ptr[op])]
        target = next_read(s.nodes, m.users_ptr, m.users, value, stage, len(s.peak))
    elif kind == 1 and m.inputs_ptr[op + 1] > m.inputs_ptr[op]:
        value = m.inputs[m.inputs_ptr[op] + draw(s.random, m.inputs_ptr[op + 1] - m.inputs_ptr[op])]
        target = np.int64(s.nodes[copy_at(s.nodes, m.producer, m.held_from, value, stage), STAGE])
    else:
        target = stage + draw(s.random, np.int64(17)) - 8
    if not m.first_stage[op] <= target <= m.last_stage[op] or node_at(s.nodes, target, op) >= 0:
        return
    write_down(s.journal, s.counters, stage, op, REMOVING)
    remove(m, s, node)
    recompute(m, s, target, op, target, 0.0, 0.3, np.int64(4))


@inner
def propose(m, s):
    """Make one random move."""
    count = s.counters[RECOMPUTED]
    lot = draw(s.random, np.int64(100))
    crowded = s.counters[EXCESS] > 0
    if count > 0 and lot >= (50 if crowded else 10):
        node = s.pool[draw(s.random, count)]
        if 70 <= lot < 85 and m.outputs_ptr[s.nodes[node, OP] + 1] > m.outputs_ptr[s.nodes[node, OP]]:
            move_elsewhere(m, s, node)
            return
        prune(m, s, node)
        if lot < 70:
            return
        settle(m, s)
    evict(m, s, crowded_stage(s.peak, s.counters[EXCESS], m.budget[0], s.random), 1 + draw(s.random, np.int64(3)))


@inner
def keep_if_best(nodes, pool, best, counters):
    """Copy the current set if it is within the budget and the cheapest so far."""
    if counters[EXCESS] > 0 or counters[COST] >= counters[BEST_COST]:
        return
    count = counters[RECOMPUTED]
    for place in range(count):
        node = pool[place]
        best[place, 0] = nodes[node, STAGE]
        best[place, 1] = nodes[node, OP]
    counters[BEST_COUNT] = count
    counters[BEST_COST] = counters[COST]


@outer
def anneal(m, s, moves):
    """Try `moves` random moves at the temperature and the weight of excess memory in `levels`."""
    temperature, weight = s.levels[TEMPERATURE], s.levels[WEIGHT]
    for _ in range(moves):
        cost, excess = s.counters[COST], s.counters[EXCESS]
        s.counters[JOURNAL] = 0
        slack = -temperature * np.log(chance(s.random) + 1e-12)  # Metropolis: how much worse this move may be
        s.levels[COST_LIMIT] = cost + weight * excess + slack
        propose(m, s)
        hopeless = s.levels[COST_LIMIT] < 0
        if not hopeless:
            settle(m, s)
        if hopeless or (s.counters[COST] - cost) + weight * (s.counters[EXCESS] - excess) > slack:
            undo(m, s)
        s.counters[FEASIBLE_MOVES] += s.counters[EXCESS] == 0
        keep_if_best(s.nodes, s.pool, s.best, s.counters)


@outer
def trim(m, s):
    """Leave out every recomputation that can be spared without more excess, later ones of the pool first."""
    for place in range(s.counters[RECOMPUTED] - 1, -1, -1):
        if place >= s.counters[RECOMPUTED]:  # gone together with another
            continue
        excess = s.counters[EXCESS]
        s.counters[JOURNAL] = 0
        prune(m, s, s.pool[place])
        settle(m, s)
        if s.counters[EXCESS] > excess:
            undo(m, s)
    keep_if_best(s.nodes, s.pool, s.best, s.counters)


@outer
def load(m, s, chosen):
    """Make `chosen`, rows of (stage, operator), the current set of recomputations."""
    while s.counters[RECOMPUTED] > 0:
        remove(m, s, s.pool[s.counters[RECOMPUTED] - 1])
    for row in range(len(chosen)):
        add(m, s, np.int64(chosen[row, 0]), chosen[row, 1])
    settle(m, s)
    keep_if_best(s.nodes, s.pool, s.best, s.counters)
