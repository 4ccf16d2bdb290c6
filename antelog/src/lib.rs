//! antelog
pub mod cluster;
