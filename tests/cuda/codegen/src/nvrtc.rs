//! NVRTC, loaded from a folder with `lib`, `include` and `bin`: a CUDA toolkit, or the
//! `nvidia/cu13` of the PyPI wheels.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::{Condvar, Mutex};
use std::time::SystemTime;

use cubecl_common::hash::StableHasher;
use libloading::{Library, Symbol};
use tempfile::{NamedTempFile, TempDir};

use crate::ptxas::Version;

/// Loaded compiler.
pub struct Nvrtc {
    /// Unused libraries. NVRTC compiles one program at a time for all threads, but a copy of its
    /// file loads as a separate library.
    free: Mutex<Vec<Loaded>>,
    freed: Condvar,
    /// Builtins that NVRTC would search next to its file, which a copy lacks.
    _builtins: Vec<Library>,
    root: PathBuf,
    /// Results of earlier runs, by a hash of what gave them.
    results: PathBuf,
    /// The library's file: length and time.
    file: (u64, Option<SystemTime>),
}

/// Library, and a folder for its precompiled headers, which no other process or thread can read.
struct Loaded {
    library: Library,
    folder: TempDir,
}

/// Maximum number of libraries; there is at most one per core.
const MOST_LIBRARIES: usize = 4;

/// Headers that CubeCL includes with TMA. NVRTC reads them in over a second, or precompiled in a tenth.
const SLOW_HEADERS: [&str; 3] = ["cooperative_groups.h", "cooperative_groups/memcpy_async.h", "cuda/barrier"];

/// Removes those headers from `source` if it does not use them. Only the line numbers change.
fn without_unused(source: &str) -> String {
    let is_slow = |line: &str| SLOW_HEADERS.iter().any(|header| line == format!("#include <{header}>"));
    let used = ["cooperative_groups::", "cuda::"].iter().any(|name| source.contains(name));
    source.lines().filter(|line| used || !is_slow(line)).flat_map(|line| [line, "\n"]).collect()
}

/// Source with sorted declarations: CubeCL prints the types and the variables of a kernel in varying
/// order.
pub(crate) fn sorted(source: &str) -> String {
    let (types, body) = source.split_at(source.find("extern \"C\"").unwrap_or(0));
    let [mut types, mut body] = [types, body].map(|part| part.lines().collect::<Vec<_>>());
    types.sort_unstable();
    let is_declaration = |line: &str| line.ends_with(';') && line.split(' ').count() == 2 && !line.contains('(');
    body.chunk_by_mut(|a, b| is_declaration(a) && is_declaration(b)).for_each(<[_]>::sort_unstable);
    [types, body].concat().join("\n")
}

type Program = *mut c_void;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Fetch = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

impl Nvrtc {
    /// Compiler of the toolkit that `FLOAT8_CUDA_TOOLS` names. Without the variable, prints that
    /// the test is skipped and returns None.
    ///
    /// # Panics
    /// If the variable is not set in CI, or its folder is not a toolkit.
    pub fn from_env() -> Option<Self> {
        let Some(root) = std::env::var_os("FLOAT8_CUDA_TOOLS") else {
            test_data::skip(test_data::CUDA_TOOLS);
            return None;
        };
        Some(Self::load(Path::new(&root)).unwrap_or_else(|error| panic!("{error}")))
    }

    /// # Errors
    /// No NVRTC library in the folder, with the searched names; a library that cannot be loaded, or
    /// copied to a temporary folder.
    pub fn load(root: &Path) -> Result<Self, String> {
        let folder = ["lib", "lib64"].map(|lib| root.join(lib));
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let candidates = folder.iter().flat_map(|folder| names.map(|name| folder.join(name)));
        let path = candidates.into_iter().find(|path| path.exists());
        let path = path.ok_or_else(|| format!("{}: no lib/{}", root.display(), names.join(", ")))?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let builtins = beside(&path, "libnvrtc-builtins.so").iter().map(|path| open(path)).collect::<Result<_, _>>()?;
        let libraries = (0..cores.min(MOST_LIBRARIES)).map(|_| open_copy(&path)).collect::<Result<_, _>>()?;
        let fail = |error: std::io::Error| format!("{}: {error}", path.display());
        let file = path.metadata().map_err(fail)?;
        let test = std::env::current_exe().map_err(fail)?;
        Ok(Self {
            free: Mutex::new(libraries),
            freed: Condvar::new(),
            _builtins: builtins,
            root: root.into(),
            results: test.with_file_name("nvrtc"),
            file: (file.len(), file.modified().ok()),
        })
    }

    /// Folder of the toolkit.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Version of CUDA of the library.
    ///
    /// # Errors
    /// The library does not report it.
    pub fn release(&self) -> Result<Version, String> {
        // SAFETY: the signature is from nvrtc.h.
        self.with_library(|Loaded { library, .. }| unsafe {
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                symbol(library, b"nvrtcVersion\0")?;
            let (mut major, mut minor) = (0, 0);
            match version(&mut major, &mut minor) {
                0 => Ok((major.unsigned_abs(), minor.unsigned_abs())),
                status => Err(format!("nvrtcVersion: {status}")),
            }
        })
    }

    /// Compiles `source` to machine code for `arch`, such as `sm_90a`, with CubeCL's options.
    ///
    /// # Errors
    /// The compiler's log; ptxas warnings of lost performance, such as serialized `wgmma`.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Vec<u8>, String> {
        self.product(source, arch, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
    }

    /// Compiles `source` to PTX for compute capability `sm`, with the same options.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn ptx(&self, source: &str, sm: u32) -> Result<String, String> {
        let arch = match sm {
            90 | 100.. => format!("compute_{sm}a"),
            _ => format!("compute_{sm}"),
        };
        let mut ptx = self.product(source, &arch, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?;
        while ptx.last() == Some(&0) {
            ptx.pop();
        }
        String::from_utf8(ptx).map_err(|error| error.to_string())
    }

    /// Runs `compile` with exclusive use of a library.
    fn with_library<T>(&self, compile: impl FnOnce(&Loaded) -> T) -> T {
        let free = self.free.lock().expect("nothing panics here");
        let library = self.freed.wait_while(free, |free| free.is_empty()).expect("nothing panics here").pop();
        let library = library.expect("waited for");
        let result = compile(&library);
        self.free.lock().expect("nothing panics here").push(library);
        self.freed.notify_one();
        result
    }

    /// Result of an earlier run, or of a compilation: most of a test's time.
    fn product(&self, source: &str, arch: &str, size: &[u8], bytes: &[u8]) -> Result<Vec<u8>, String> {
        let key = StableHasher::hash_one(&(&self.root, self.file, sorted(source), arch, bytes));
        let path = self.results.join(format!("{key:032x}"));
        if let Ok(found) = std::fs::read(&path) {
            return Ok(found);
        }
        let result = self.compile_anew(source, arch, size, bytes)?;
        // Another test may write it too. Without the file the next run compiles again.
        let written = std::fs::create_dir_all(&self.results).and_then(|()| {
            let mut file = NamedTempFile::new_in(&self.results)?;
            file.write_all(&result)?;
            file.persist(&path).map_err(|error| error.error)
        });
        drop(written);
        Ok(result)
    }

    /// Compiles `source`, then fetches the result with the two functions.
    fn compile_anew(&self, source: &str, arch: &str, size: &[u8], bytes: &[u8]) -> Result<Vec<u8>, String> {
        let root = self.root.display();
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            format!("--include-path={root}/include"),
            format!("--include-path={root}/include/cccl"),
            "-lineinfo".into(),
            // Makes the log include ptxas warnings.
            "--ptxas-options=-v".into(),
        ];
        let source = without_unused(source);
        let is_slow = SLOW_HEADERS.iter().any(|header| source.contains(header));
        let source = CString::new(source).map_err(|error| error.to_string())?;
        // SAFETY: the signatures are from nvrtc.h. Every pointer outlives its call, and buffers
        // have the sizes that NVRTC reports.
        self.with_library(|Loaded { library, folder }| unsafe {
            if is_slow {
                options.extend(["--pch".into(), format!("--pch-dir={}", folder.path().display())]);
            }
            let options: Vec<_> = options.into_iter().map(|o| CString::new(o).expect("no NUL in a path")).collect();
            let create: Symbol<
                unsafe extern "C" fn(
                    *mut Program,
                    *const c_char,
                    *const c_char,
                    c_int,
                    *const *const c_char,
                    *const *const c_char,
                ) -> c_int,
            > = symbol(library, b"nvrtcCreateProgram\0")?;
            let compile: Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
                symbol(library, b"nvrtcCompileProgram\0")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                symbol(library, b"nvrtcDestroyProgram\0")?;

            let mut program: Program = null_mut();
            let status = create(&mut program, source.as_ptr(), null(), 0, null(), null());
            if status != 0 {
                return Err(format!("nvrtcCreateProgram: {status}"));
            }
            let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let log = fetch(library, program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            let log = CStr::from_bytes_until_nul(&log).map_or_else(|_| "no log".into(), CStr::to_string_lossy);
            let is_code = bytes.starts_with(b"nvrtcGetCUBIN");
            let lost: Vec<_> = log.lines().filter(|line| is_code && line.contains("Performance Loss")).collect();
            let result = match status {
                0 if lost.is_empty() => fetch(library, program, size, bytes),
                0 => Err(lost.join("\n")),
                _ => Err(log.clone().into_owned()),
            };
            destroy(&mut program);
            result
        })
    }
}

fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: loading NVRTC only runs its initializers.
    unsafe { Library::new(path) }.map_err(|error| format!("{}: {error}", path.display()))
}

/// Files in the folder of `path` with this name prefix.
fn beside(path: &Path, name: &str) -> Vec<PathBuf> {
    let entries = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(name)).map(|entry| entry.path()).collect()
}

/// Loads a copy of the library, which is deleted afterwards.
fn open_copy(path: &Path) -> Result<Loaded, String> {
    let fail = |error| format!("copying {}: {error}", path.display());
    let folder = TempDir::new().map_err(fail)?;
    let copy = folder.path().join("libnvrtc.so");
    std::fs::copy(path, &copy).map_err(fail)?;
    Ok(Loaded { library: open(&copy)?, folder })
}

/// Fetches a result of NVRTC with its size and bytes functions.
///
/// # Safety
/// `program` is alive, and the names are of a matching pair.
unsafe fn fetch(library: &Library, program: Program, size: &[u8], bytes: &[u8]) -> Result<Vec<u8>, String> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (size, bytes) = (symbol::<SizeOf>(library, size)?, symbol::<Fetch>(library, bytes)?);
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
unsafe fn symbol<'a, T>(library: &'a Library, name: &[u8]) -> Result<Symbol<'a, T>, String> {
    // SAFETY: guaranteed by the caller.
    unsafe { library.get(name) }.map_err(|error| error.to_string())
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
