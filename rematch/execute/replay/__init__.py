"""The replay engine: generated source for forward and backward, where Dynamo can trace and guard the whole forward."""
