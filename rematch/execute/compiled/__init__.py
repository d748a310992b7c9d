"""Schedules run by inductor: `torch.compile(model, backend="rematch", options={"budget": "8GiB"})`."""
