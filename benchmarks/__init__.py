"""What compares speeds and memory; not part of the wheel. ``python -m benchmarks`` lists it."""
