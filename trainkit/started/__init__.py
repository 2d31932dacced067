"""How a process of trainkit's own is started, so that nothing in the user's folder is imported."""
