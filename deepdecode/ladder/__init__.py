"""The ladder: the rungs of the campaign, each checked, timed, profiled and written down on the reader's own card."""
