"""Measurements: check first, then time, floor and fraction, written as result files."""
