"""Tandem: a disaggregated prefill/decode cluster for serving large language models."""
