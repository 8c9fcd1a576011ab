"""Forward passes, one file per family of architectures; never sees a plan or samples."""
