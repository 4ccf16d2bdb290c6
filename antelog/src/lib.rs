//! antelog
