"""Memory and time of a run before it is started: no GPU, no weights, no torch.

Every tensor that a step keeps is counted from the model's sizes and the step's moments are compared
(`peak`); times come from operations and bytes (`speed`).
"""
