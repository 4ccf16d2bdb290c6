//! libibverbs, loaded when a device is first wanted, so that a machine without it runs everything else.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix as dl;

use super::ffi::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

/// The name every release since 2005 goes by.
const FILE: &str = "libibverbs.so.1";

/// Declares the table of functions and fills it from the library.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// libibverbs' control functions. Set-up and tear-down only: data goes through the device's own table.
        pub struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(library: &dl::Library) -> Result<Library, &'static str> {
                Ok(Library {
                    $($field: {
                        // SAFETY: the type is that of the header for this name (all of version IBVERBS_1.1 or older, which
                        // is what an unversioned look-up finds), and the library is never unloaded.
                        unsafe { *library.get(concat!($symbol, "\0").as_bytes()).map_err(|_| $symbol)? }
                    },)*
                })
            }
        }
    };
}

functions! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut ibv_device);
    get_device_name = "ibv_get_device_name": fn(*mut ibv_device) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
    close_device = "ibv_close_device": fn(*mut ibv_context) -> c_int;
    query_device = "ibv_query_device": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port = "ibv_query_port": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid = "ibv_query_gid": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    get_async_event = "ibv_get_async_event": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event = "ibv_ack_async_event": fn(*mut ibv_async_event);
    alloc_pd = "ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
    reg_mr = "ibv_reg_mr": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = "ibv_destroy_comp_channel": fn(*mut ibv_comp_channel) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
    get_cq_event = "ibv_get_cq_event": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": fn(*mut ibv_cq, c_uint);
    create_qp = "ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp = "ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
}

/// The library, loaded at the first call.
///
/// # Errors
/// One line: what was tried, what went wrong and what to install.
pub fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(|| load(FILE)).as_ref().map_err(Clone::clone)
}

fn load(file: &str) -> Result<Library, String> {
    // SAFETY: loading runs the initialisers of the system's own libibverbs, which have no conditions.
    let opened = unsafe { dl::Library::open(Some(file), dl::RTLD_NOW | dl::RTLD_LOCAL) };
    let opened = opened.map_err(|error| {
        let why = error_text(&error);
        format!("cannot load {file} ({why}): install the packages libibverbs1 and ibverbs-providers (rdma-core)")
    })?;
    let found = Library::find(&opened).map_err(|symbol| {
        format!("{file} lacks {symbol}: install rdma-core 39 or later (libibverbs1, ibverbs-providers)")
    });
    // Never unloaded: the drivers it loads register themselves with it and with the C library.
    std::mem::forget(opened);
    found
}

/// The loader's own message, which the error hides behind its source.
fn error_text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string).replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_line_that_says_what_to_install() {
        let error = load("libibverbs-that-nobody-has.so.1").err().unwrap();
        assert!(error.starts_with("cannot load libibverbs-that-nobody-has.so.1 ("), "{error}");
        assert!(error.ends_with("install the packages libibverbs1 and ibverbs-providers (rdma-core)"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_named_as_too_old() {
        let error = load("libc.so.6").err().unwrap();
        assert_eq!(
            error,
            "libc.so.6 lacks ibv_get_device_list: install rdma-core 39 or later (libibverbs1, ibverbs-providers)"
        );
    }
}
