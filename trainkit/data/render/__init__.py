"""From a conversation to tokens: the chat template, the spans and the masks."""
