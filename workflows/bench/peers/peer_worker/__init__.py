"""The process that runs one peer under the interpreter that has it. See `__main__`."""
