"""From files to conversations: formats, messages, fields."""
