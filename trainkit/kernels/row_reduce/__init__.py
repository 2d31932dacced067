"""The largest or smallest element of each row."""
