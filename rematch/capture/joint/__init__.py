"""The joint forward and backward graph that AOTAutograd traces, read as our Graph: what the replay engine runs."""
