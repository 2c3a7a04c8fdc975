"""Measurements, one file for each name of `composer bench`."""
