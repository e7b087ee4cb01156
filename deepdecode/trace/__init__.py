"""Read a GPU trace and say where the time goes. Imports neither torch nor the rest of the package."""

from deepdecode.trace.categories import Rules, load_rules, why
from deepdecode.trace.load import load
from deepdecode.trace.model import Profile, Trace, TraceError
from deepdecode.trace.profile import profile

__all__ = ["Profile", "Rules", "Trace", "TraceError", "load", "load_rules", "profile", "why"]
