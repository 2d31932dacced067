"""What every field of TrainingArguments does in trainkit."""
