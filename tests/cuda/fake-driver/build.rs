//! Names the library as the driver's, so that opening it by path answers later requests by name.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
