mod bad_files;
mod good_files;
mod sets;
