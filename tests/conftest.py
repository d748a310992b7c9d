"""Settings for all tests. Examples have no deadline: a kernel being compiled or a busy machine is not their fault."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("rematch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rematch")
