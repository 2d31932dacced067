"""Rows of conversations, and what of a sample is trained."""


def chat(*texts, system=None):
    """A row of user and assistant turns in alternation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for place, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[place % 2], "content": text})
    return {"messages": messages}


def trained_texts(tokenizer, sample):
    """The decoded runs of trained tokens of a sample."""
    runs, current = [], []
    for token, trained in zip(sample["input_ids"], sample["loss_mask"], strict=True):
        if trained:
            current.append(int(token))
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    if current:
        runs.append(tokenizer.decode(current))
    return runs
