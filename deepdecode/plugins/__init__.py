"""Plug-ins: our ops inside engines that are installed as they are. An engine that is not the one we know stays untouched."""
