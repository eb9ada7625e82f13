"""Small Python functions to write, in the format of HumanEval: families of our own with many variants each."""
