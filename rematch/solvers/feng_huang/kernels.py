"""Compiled inner loops: the largest segments of a graph, and the cheapest checkpoints for a max term."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def find_largest_segments(pointer, neighbours, first, last, largest, ends):
    """For each vertex the largest segment around it of which an end is one of `first` to `last`.

    Vertices are in topological order, neighbours as of an undirected graph in which the first and last are tied. A
    segment between u and v is what hangs on v alone once u is taken away. `largest` is its number of inner vertices,
    `ends` are its two ends; both are only ever replaced by those of a larger segment.
    """
    count = len(pointer) - 1
    found_at = np.empty(count, dtype=np.int32)
    reaches = np.empty(count, dtype=np.int32)
    parent = np.empty(count, dtype=np.int32)
    preorder = np.empty(count, dtype=np.int32)
    tree_size = np.empty(count, dtype=np.int32)
    hanging = np.empty(count, dtype=np.int32)
    holder = np.empty(count, dtype=np.int32)
    for removed in range(first, last):
        root = count - 1 if removed == 0 else 0
        seen = _search(pointer, neighbours, removed, root, found_at, reaches, parent, preorder)
        tree_size[:] = 1
        hanging[:] = 0
        for index in range(seen - 1, 0, -1):
            vertex = preorder[index]
            above = parent[vertex]
            tree_size[above] += tree_size[vertex]
            if above != root and reaches[vertex] >= found_at[above]:
                hanging[above] += tree_size[vertex]
        holder[root] = -1
        for index in range(1, seen):
            vertex = preorder[index]
            above = parent[vertex]
            holder[vertex] = holder[above]
            if holder[vertex] < 0 and above != root and reaches[vertex] >= found_at[above]:
                holder[vertex] = above
            held_by = holder[vertex]
            if held_by >= 0 and hanging[held_by] > largest[vertex]:
                largest[vertex] = hanging[held_by]
                ends[0, vertex] = min(removed, held_by)
                ends[1, vertex] = max(removed, held_by)


@njit(cache=True)
def _search(pointer, neighbours, removed, root, found_at, reaches, parent, preorder):
    """Depth-first from `root` around `removed`: when each vertex is found, and how high up its subtree is tied."""
    found_at[:] = -1
    found_at[root] = reaches[root] = 0
    parent[root] = -1
    preorder[0] = root
    upcoming = pointer[:-1].copy()
    seen = 1
    vertex = root
    while vertex >= 0:
        if upcoming[vertex] == pointer[vertex + 1]:
            above = parent[vertex]
            if above >= 0:
                reaches[above] = min(reaches[above], reaches[vertex])
            vertex = above
            continue
        other = neighbours[upcoming[vertex]]
        upcoming[vertex] += 1
        if other == removed or other == parent[vertex]:
            continue
        if found_at[other] >= 0:
            reaches[vertex] = min(reaches[vertex], found_at[other])
            continue
        found_at[other] = reaches[other] = seen
        parent[other] = vertex
        preorder[seen] = other
        seen += 1
        vertex = other
    return seen


@njit(cache=True)
def accessible_from(before, behind, start, end, term, first):
    """The accessibility graph of positions `start` to `end` on a line: the first one from which each can be reached.

    The bytes between positions i and j are `before[j] - behind[i]`. They grow with j and shrink with i, so what j can
    be reached from is a range that ends at j - 1; for an empty one `first[j]` is j.
    """
    source = start
    for target in range(start, end):
        while source < target and before[target] - behind[source] > term:
            source += 1
        first[target] = source


@njit(cache=True)
def shortest_path(tree, node, price, work):
    """From the first position of a line to its last one, over the accessibility graph and divided children.

    `work.spent` are the bytes of checkpoints up to each position and `work.lost` the seconds to compute again; the
    path is the best one by `_less`. The least of a range that only moves on is at the head of a queue of candidates,
    each better than those that came after it.
    """
    spent, lost, queue, behind = work.spent, work.lost, work.queue, tree.seconds_behind
    start, end = tree.position_ptr[node], tree.position_ptr[node + 1]
    spent[start], lost[start] = 0, 0.0
    head, tail = start, start
    for target in range(start + 1, end):
        latest = target - 1
        while tail > head:
            rival = queue[tail - 1]
            if _less(spent[rival], lost[rival] - behind[rival], spent[latest], lost[latest] - behind[latest], price):
                break
            tail -= 1
        queue[tail] = latest
        tail += 1
        while head < tail and queue[head] < work.first[target]:
            head += 1
        child = tree.child[tree.child_ptr[node] + latest - start]
        best, best_lost, previous = spent[latest], lost[latest], ~latest
        if child >= 0:
            best += work.spent_inside[child]
            best_lost += work.lost_inside[child]
        if head < tail:
            source = queue[head]
            through = lost[source] + tree.seconds_before[target] - behind[source]
            if _less(spent[source], through, best, best_lost, price):
                best, best_lost, previous = spent[source], through, source
        spent[target] = best + tree.bytes_behind[target] - tree.bytes_before[target]
        lost[target] = best_lost
        work.previous[target] = previous


@njit(cache=True)
def _less(one_bytes, one_seconds, other_bytes, other_seconds, price):
    """Whether one costs less, where a byte has a `price` in seconds; with an infinite one seconds only break ties."""
    if price < np.inf:
        return price * one_bytes + one_seconds < price * other_bytes + other_seconds
    return one_bytes < other_bytes or (one_bytes == other_bytes and one_seconds < other_seconds)


@njit(cache=True)
def solve_term(tree, term, price, work):
    """The cheapest checkpoints inside the graph with no segment above `term`: bytes, and seconds to compute again.

    `work` is filled with how that is reached: which nodes are divided, and each position's predecessor on its line, as
    complement where the child between the two is solved by itself.
    """
    for node in range(len(tree.bytes_inside) - 1, -1, -1):  # children have higher numbers than their parents
        fits = tree.bytes_inside[node] <= term
        if tree.is_linear[node]:
            start, end = tree.position_ptr[node], tree.position_ptr[node + 1]
            accessible_from(tree.bytes_before, tree.bytes_behind, start, end, term, work.first)
            shortest_path(tree, node, price, work)
            spent, lost = work.spent[end - 1], work.lost[end - 1]
            divided = True
        else:
            spent, lost = tree.bytes_of_points[node], 0.0
            for index in range(tree.child_ptr[node], tree.child_ptr[node + 1]):
                spent += work.spent_inside[tree.child[index]]
                lost += work.lost_inside[tree.child[index]]
            divided = not fits or _less(spent, lost, 0, tree.seconds_inside[node], price)
            if not divided:
                spent, lost = 0, tree.seconds_inside[node]
        work.spent_inside[node] = spent
        work.lost_inside[node] = lost
        work.is_divided[node] = divided
    return work.spent_inside[0], work.lost_inside[0]


@njit(cache=True)
def solve_terms(tree, terms, spent, lost, ranges, progress, most, work):
    """Fill `spent` and `lost` with what `solve_term` says of each of the ascending `terms`, as far as `most` go.

    Both fall with the terms, so terms between two with equal results have the same. The widest ranges are halved
    first. `ranges` holds their starts and ends, of which `progress[0]` are done and `progress[1]` known: a call goes on
    where the last one ended, after `most` further terms. With `most` = 0 all that is left gets the result of the next
    smaller term that was solved.
    """
    solved = 0
    while progress[0] < progress[1] and (solved < most or most == 0):
        start, end = ranges[progress[0]]
        progress[0] += 1
        known = progress[1]
        same = spent[start] == spent[end] and lost[start] == lost[end]
        if end - start < 2 or same or most == 0 or known + 2 > len(ranges):
            spent[start + 1 : end] = spent[start]
            lost[start + 1 : end] = lost[start]
            continue
        middle = (start + end) // 2
        spent[middle], lost[middle] = solve_term(tree, terms[middle], np.inf, work)
        ranges[known, 0], ranges[known, 1] = start, middle
        ranges[known + 1, 0], ranges[known + 1, 1] = middle, end
        progress[1] += 2
        solved += 1
