//! NVRTC, loaded from a folder with `lib`, `include` and `bin`: a CUDA toolkit, or the `nvidia/cu13` of the PyPI wheels.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;

/// The loaded compiler.
pub struct Nvrtc {
    library: Library,
    root: PathBuf,
}

/// Headers that CubeCL includes wherever TMA is used. Reading them takes NVRTC four seconds.
const SLOW_HEADERS: [&str; 3] = ["cooperative_groups.h", "cooperative_groups/memcpy_async.h", "cuda/barrier"];

/// `source` without those headers if it uses nothing of theirs, which changes nothing but the line numbers.
fn without_unused(source: &str) -> String {
    let is_slow = |line: &str| SLOW_HEADERS.iter().any(|header| line == format!("#include <{header}>"));
    let used = ["cooperative_groups::", "cuda::"].iter().any(|name| source.contains(name));
    source.lines().filter(|line| used || !is_slow(line)).flat_map(|line| [line, "\n"]).collect()
}

type Program = *mut c_void;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Fetch = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

impl Nvrtc {
    /// # Errors
    /// No library of NVRTC in the folder, with what was looked for.
    pub fn load(root: &Path) -> Result<Self, String> {
        let folder = ["lib", "lib64"].map(|lib| root.join(lib));
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let candidates = folder.iter().flat_map(|folder| names.map(|name| folder.join(name)));
        let path = candidates.into_iter().find(|path| path.exists());
        let path = path.ok_or_else(|| format!("{}: no lib/{}", root.display(), names.join(", ")))?;
        // SAFETY: loading NVRTC only runs its initializers.
        let library = unsafe { Library::new(&path) }.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { library, root: root.into() })
    }

    /// The toolkit's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Machine code of `source` for `arch`, such as `sm_90a`, with the options that CubeCL passes.
    ///
    /// # Errors
    /// The compiler's log; what ptxas says of lost performance, such as `wgmma` that it serialized.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Vec<u8>, String> {
        self.product(source, arch, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
    }

    /// PTX of `source` for `arch`, with the same options.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn ptx(&self, source: &str, arch: &str) -> Result<String, String> {
        let mut ptx = self.product(source, arch, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?;
        while ptx.last() == Some(&0) {
            ptx.pop();
        }
        String::from_utf8(ptx).map_err(|error| error.to_string())
    }

    /// Compiles `source`, then fetches what the two functions give.
    fn product(&self, source: &str, arch: &str, size: &[u8], bytes: &[u8]) -> Result<Vec<u8>, String> {
        let root = self.root.display();
        let options = [
            format!("--gpu-architecture={arch}"),
            format!("--include-path={root}/include"),
            format!("--include-path={root}/include/cccl"),
            "-lineinfo".into(),
            // Only for the log to hold what ptxas has to say.
            "--ptxas-options=-v".into(),
        ];
        let options = options.map(|option| CString::new(option).expect("no NUL in a path"));
        let source = CString::new(without_unused(source)).map_err(|error| error.to_string())?;
        // SAFETY: the signatures are those of nvrtc.h; every pointer outlives the call that it is passed to, and buffers
        // have the sizes that NVRTC names.
        unsafe {
            let create: libloading::Symbol<
                unsafe extern "C" fn(
                    *mut Program,
                    *const c_char,
                    *const c_char,
                    c_int,
                    *const *const c_char,
                    *const *const c_char,
                ) -> c_int,
            > = self.symbol(b"nvrtcCreateProgram\0")?;
            let compile: libloading::Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
                self.symbol(b"nvrtcCompileProgram\0")?;
            let destroy: libloading::Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.symbol(b"nvrtcDestroyProgram\0")?;

            let mut program: Program = null_mut();
            let status = create(&mut program, source.as_ptr(), null(), 0, null(), null());
            if status != 0 {
                return Err(format!("nvrtcCreateProgram: {status}"));
            }
            let pointers = options.each_ref().map(|option| option.as_ptr());
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let log = self.fetch(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            let log = CStr::from_bytes_until_nul(&log).map_or_else(|_| "no log".into(), CStr::to_string_lossy);
            let lost: Vec<_> = log.lines().filter(|line| line.contains("Performance Loss")).collect();
            let result = match status {
                0 if lost.is_empty() => self.fetch(program, size, bytes),
                0 => Err(lost.join("\n")),
                _ => Err(log.clone().into_owned()),
            };
            destroy(&mut program);
            result
        }
    }

    /// A result of NVRTC's, by the pair of functions that give its size and its bytes.
    ///
    /// # Safety
    /// `program` is alive, and both names are those of such a pair.
    unsafe fn fetch(&self, program: Program, size: &[u8], bytes: &[u8]) -> Result<Vec<u8>, String> {
        // SAFETY: by the caller.
        unsafe {
            let (size, bytes) = (self.symbol::<SizeOf>(size)?, self.symbol::<Fetch>(bytes)?);
            let mut len = 0;
            let status = size(program, &mut len);
            let mut buffer = vec![0u8; len];
            if status != 0 || bytes(program, buffer.as_mut_ptr().cast()) != 0 {
                return Err("NVRTC did not give its result".into());
            }
            Ok(buffer)
        }
    }

    /// # Safety
    /// `T` is the symbol's signature.
    unsafe fn symbol<T>(&self, name: &[u8]) -> Result<libloading::Symbol<'_, T>, String> {
        // SAFETY: by the caller.
        unsafe { self.library.get(name) }.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_in_use_stay() {
        let head = "#include <cuda_bf16.h>\n#include <cuda/barrier>\n";
        let (uses, does_not) = (format!("{head}cuda::barrier b;\n"), format!("{head}int i;\n"));
        assert_eq!(without_unused(&uses), uses);
        assert_eq!(without_unused(&does_not), "#include <cuda_bf16.h>\nint i;\n");
    }
}
