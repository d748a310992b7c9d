"""The default solver `auto` and the searches it combines: greedy, local search and the epoch relaxation."""
