"""One plain model of an adapter and its base."""
