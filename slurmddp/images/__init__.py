"""Container images: NGC releases, definition files, and the Apptainer or Singularity that builds them."""
