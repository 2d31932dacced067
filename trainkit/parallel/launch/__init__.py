"""How the processes of a run are started, and how they find one another."""
