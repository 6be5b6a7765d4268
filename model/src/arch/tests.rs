mod fixtures;
mod refused;
mod variants;
