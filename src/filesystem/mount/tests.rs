//! What can be told about a mount without making one.

use super::*;

#[test]
fn a_comma_is_no_mount_option() {
    assert_eq!(escaped("/data,allow_other"), "/data\\,allow_other");
    assert_eq!(escaped("/plain"), "/plain");
}
