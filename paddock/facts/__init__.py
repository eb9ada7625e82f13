"""What is true outside this project: public model shapes and data sets, the machine at hand. Imports nothing heavy."""
