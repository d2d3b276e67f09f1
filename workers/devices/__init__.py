"""Devices that ranks compute on: CPU, CUDA, and emulated ones that wait out modelled times.

Not here: Messages between them.
"""
