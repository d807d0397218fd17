/* A stand-in for the CANN libraries that torch_npu links to or opens at run time. Nothing here is Ascend's.
 *
 * It lets the unmodified C++ of torch_npu be imported and driven where there is no NPU, to see which calls its
 * profiler makes and what it writes by itself. It computes nothing and records no device. Functions that fill
 * an argument have a body; the others note their name, where asked to, and return 0.
 *
 *   FAKE_CANN_LOG=<file>     a line for each call worth noting
 *   FAKE_CANN_FAIL=a,b       these functions return an error
 *   FAKE_CANN_DEVICES=<n>    how many devices there are (1)
 *   FAKE_CANN_PROF=1         write a PROF_* folder with what was seen here: the clocks at the start and the
 *                            mstx ranges that ended. Whatever device data is made of it later is invented.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define JUST_NOTED(name) API int name() { note(#name); return 0; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(const char *format, ...) {
    const char *path = getenv("FAKE_CANN_LOG");
    if (!path) return;
    pthread_mutex_lock(&lock);
    FILE *file = fopen(path, "a");
    if (file) {
        va_list arguments;
        va_start(arguments, format);
        vfprintf(file, format, arguments);
        va_end(arguments);
        fputc('\n', file);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

static int result_of(const char *name) {
    const char *failing = getenv("FAKE_CANN_FAIL");
    const char *found = failing ? strstr(failing, name) : 0;
    return found && (found[strlen(name)] == 0 || found[strlen(name)] == ',') ? 100000 : 0;
}

static int64_t ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The runtime (libascendcl) */

static __thread int device = 0;
static uintptr_t next_handle = 0x2000;
static void *handle(void) { return (void *)__sync_fetch_and_add(&next_handle, 16); }

API int aclInit(const char *config) { (void)config; note("aclInit"); return 0; }
API int aclFinalize(void) { note("aclFinalize"); return 0; }
API int aclrtGetDeviceCount(uint32_t *count) {
    const char *said = getenv("FAKE_CANN_DEVICES");
    *count = said ? (uint32_t)atoi(said) : 1;
    return 0;
}
API int aclrtGetDevice(int32_t *id) { *id = device; return 0; }
API int aclrtSetDevice(int32_t id) { device = id; note("aclrtSetDevice(%d)", id); return 0; }
API int aclrtResetDevice(int32_t id) { (void)id; return 0; }
API const char *aclrtGetSocName(void) { return "Ascend910B3"; }
API int aclrtGetCurrentContext(void **context) { *context = (void *)0x1000; return 0; }
API int aclrtSetCurrentContext(void *context) { (void)context; return 0; }
API int aclrtCreateStream(void **stream) { *stream = handle(); return 0; }
API int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority; (void)flag; *stream = handle(); return 0;
}
API int aclrtDestroyStream(void *stream) { (void)stream; return 0; }
API int aclrtSynchronizeStream(void *stream) { (void)stream; return 0; }
API int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; *event = handle(); return 0; }
API int aclrtDestroyEvent(void *event) { (void)event; return 0; }
API int aclrtEventElapsedTime(float *ms, void *a, void *b) { (void)a; (void)b; *ms = 0; return 0; }
API int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
    (void)kind; *unused = *total = (size_t)1 << 30; return 0;
}
API int aclrtMalloc(void **to, size_t size, int policy) {
    (void)policy; return posix_memalign(to, 512, size ? size : 512) ? 1 : 0;
}
API int aclrtFree(void *pointer) { free(pointer); return 0; }
API int aclrtMallocHost(void **to, size_t size) { return posix_memalign(to, 512, size ? size : 512) ? 1 : 0; }
API int aclrtFreeHost(void *pointer) { free(pointer); return 0; }
API int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)room; (void)kind; memcpy(to, from, size); return 0;
}
API int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    (void)room; (void)kind; (void)stream; memcpy(to, from, size); return 0;
}
API int aclrtMemset(void *to, size_t room, int value, size_t size) {
    (void)room; memset(to, value, size); return 0;
}
API int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { (void)a; (void)b; *can = 0; return 0; }
API int aclrtDeviceGetBareTgid(int32_t *pid) { *pid = (int32_t)getpid(); return 0; }
API int aclrtSynchronizeDevice(void) { note("synchronize"); return 0; }
API int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { (void)ms; note("synchronize"); return 0; }
API const char *aclGetRecentErrMsg(void) { return ""; }
API int aclGetDeviceCapability(uint32_t id, int32_t kind, int64_t *value) {
    (void)id; (void)kind; *value = 0; return 0;
}
API int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return 0; }
API int aclrtCtxGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return 0; }
API int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return 0; }
API int aclrtCtxSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return 0; }
API void aclAppLog() {}

JUST_NOTED(aclCreateDataBuffer) JUST_NOTED(aclCreateTensorDesc) JUST_NOTED(aclDestroyDataBuffer)
JUST_NOTED(aclDestroyTensorDesc) JUST_NOTED(aclGetTensorDescDimV2) JUST_NOTED(aclGetTensorDescFormat)
JUST_NOTED(aclGetTensorDescNumDims) JUST_NOTED(aclGetTensorDescType) JUST_NOTED(aclSetTensorDescName)
JUST_NOTED(aclSetTensorFormat) JUST_NOTED(aclSetTensorPlaceMent) JUST_NOTED(aclSetTensorShape)
JUST_NOTED(aclmdlFinalizeDump) JUST_NOTED(aclmdlInitDump) JUST_NOTED(aclmdlSetDump)
JUST_NOTED(aclopCompileAndExecute) JUST_NOTED(aclopCreateAttr) JUST_NOTED(aclopDestroyAttr)
JUST_NOTED(aclopSetAttrBool) JUST_NOTED(aclopSetAttrDataType) JUST_NOTED(aclopSetAttrFloat)
JUST_NOTED(aclopSetAttrInt) JUST_NOTED(aclopSetAttrListBool) JUST_NOTED(aclopSetAttrListFloat)
JUST_NOTED(aclopSetAttrListInt) JUST_NOTED(aclopSetAttrListListInt) JUST_NOTED(aclopSetAttrString)
JUST_NOTED(aclopSetCompileFlag) JUST_NOTED(aclSetCompileopt) JUST_NOTED(aclrtBinaryGetFunction)
JUST_NOTED(aclrtBinaryLoadFromData) JUST_NOTED(aclrtDestroyStreamForce) JUST_NOTED(aclrtDeviceEnablePeerAccess)
JUST_NOTED(aclrtFreePhysical) JUST_NOTED(aclrtGetFunctionAddr) JUST_NOTED(aclrtMallocPhysical)
JUST_NOTED(aclrtMapMem) JUST_NOTED(aclrtMemExportToShareableHandle)
JUST_NOTED(aclrtMemImportFromShareableHandle) JUST_NOTED(aclrtMemSetPidToShareableHandle)
JUST_NOTED(aclrtProcessReport) JUST_NOTED(aclrtRecordEvent) JUST_NOTED(aclrtReleaseMemAddress)
JUST_NOTED(aclrtReserveMemAddress) JUST_NOTED(aclrtResetEvent) JUST_NOTED(aclrtSetDeviceSatMode)
JUST_NOTED(aclrtSetOpExecuteTimeOut) JUST_NOTED(aclrtSetOpWaitTimeout) JUST_NOTED(aclrtStreamWaitEvent)
JUST_NOTED(aclrtSynchronizeEvent) JUST_NOTED(aclrtUnmapMem) JUST_NOTED(rtDevBinaryRegister)
JUST_NOTED(rtFunctionRegister) JUST_NOTED(rtGetC2cCtrlAddr) JUST_NOTED(rtKernelLaunch)

/* What torch_npu reports to the profiler while it runs (libprofapi) */

API uint64_t MsprofSysCycleTime(void) { return (uint64_t)ns(CLOCK_MONOTONIC_RAW); }
API uint64_t MsprofGetHashId(const char *text, size_t size) {
    uint64_t hash = 5381;
    for (size_t i = 0; i < size; i++) hash = hash * 33 + (unsigned char)text[i];
    return hash;
}
JUST_NOTED(MsprofRegisterCallback) JUST_NOTED(MsprofReportAdditionalInfo) JUST_NOTED(MsprofReportApi)
JUST_NOTED(MsprofReportCompactInfo)

/* mstx (libms_tools_ext): ranges by id, in domains */

#define RANGES 65536
static struct { uint64_t id; char name[256], domain[64]; int64_t began, ended; long thread; } ranges[RANGES];
static int range_count;
static struct { void *handle; char name[64]; } domains[64];
static int domain_count;
static uint64_t last_id;

static uint64_t begin_range(const char *name, void *domain) {
    uint64_t id = __sync_add_and_fetch(&last_id, 1);
    pthread_mutex_lock(&lock);
    int at = range_count < RANGES ? range_count++ : RANGES - 1;
    pthread_mutex_unlock(&lock);
    ranges[at].id = id;
    snprintf(ranges[at].name, sizeof ranges[at].name, "%s", name);
    strcpy(ranges[at].domain, "default");
    for (int i = 0; i < domain_count; i++)
        if (domains[i].handle == domain) strcpy(ranges[at].domain, domains[i].name);
    ranges[at].began = ns(CLOCK_MONOTONIC_RAW);
    ranges[at].ended = 0;
    ranges[at].thread = syscall(SYS_gettid);
    return id;
}
static void end_range(uint64_t id) {
    for (int i = range_count - 1; i >= 0; i--)
        if (ranges[i].id == id) { ranges[i].ended = ns(CLOCK_MONOTONIC_RAW); return; }
}

API void mstxMarkA(const char *text, void *stream) { note("mstxMarkA(%s, %p)", text, stream); }
API uint64_t mstxRangeStartA(const char *text, void *stream) {
    note("mstxRangeStartA(%s, %p)", text, stream);
    return begin_range(text, 0);
}
API void mstxRangeEnd(uint64_t id) { end_range(id); note("mstxRangeEnd"); }
API void *mstxDomainCreateA(const char *name) {
    void *made = handle();
    if (domain_count < 64) {
        domains[domain_count].handle = made;
        snprintf(domains[domain_count++].name, 64, "%s", name);
    }
    return made;
}
API void mstxDomainDestroy(void *domain) { (void)domain; }
API void mstxDomainMarkA(void *domain, const char *text, void *stream) {
    (void)domain; note("mstxDomainMarkA(%s, %p)", text, stream);
}
API uint64_t mstxDomainRangeStartA(void *domain, const char *text, void *stream) {
    note("mstxDomainRangeStartA(%s, %p)", text, stream);
    return begin_range(text, domain);
}
API void mstxDomainRangeEnd(void *domain, uint64_t id) { (void)domain; end_range(id); note("mstxRangeEnd"); }

/* The profiler (libmsprofiler) */

static char prof_path[4096];
static int64_t start_wall, start_raw;

static void write_prof(void) {
    char folder[4600], path[4700], when[32];
    time_t now = time(0);
    struct tm local;
    strftime(when, sizeof when, "%Y%m%d%H%M%S", localtime_r(&now, &local));
    snprintf(folder, sizeof folder, "%s/PROF_000001_%s000_FAKECANN", prof_path, when);
    mkdir(folder, 0750);
    snprintf(path, sizeof path, "%s/device_0", folder); mkdir(path, 0750);
    snprintf(path, sizeof path, "%s/host", folder); mkdir(path, 0750);
    snprintf(path, sizeof path, "%s/host/start_info", folder);
    FILE *file = fopen(path, "w");
    fprintf(file, "{'collectionTimeBegin': '%lld', 'clockMonotonicRaw': '%lld'}", (long long)(start_wall / 1000),
            (long long)start_raw);
    fclose(file);
    snprintf(path, sizeof path, "%s/host/info.json", folder);
    file = fopen(path, "w");
    fprintf(file, "{\"CPU\": [{\"Frequency\": \"100.000000\"}], \"pid\": \"%d\", \"pid_name\": \"python\"}", (int)getpid());
    fclose(file);
    snprintf(path, sizeof path, "%s/host/fake_ranges.tsv", folder);
    file = fopen(path, "w");
    for (int i = 0; i < range_count; i++)
        if (ranges[i].ended)
            fprintf(file, "%lld\t%lld\t%ld\t%s\t%s\n", (long long)(ranges[i].began - start_raw + start_wall),
                    (long long)(ranges[i].ended - start_raw + start_wall), ranges[i].thread, ranges[i].domain,
                    ranges[i].name);
    fclose(file);
}

API int aclprofInit(const char *path, size_t size) {
    snprintf(prof_path, sizeof prof_path, "%.*s", (int)size, path);
    range_count = 0;
    note("aclprofInit");
    return result_of("aclprofInit");
}
API int aclprofFinalize(void) {
    note("aclprofFinalize");
    if (getenv("FAKE_CANN_PROF") && prof_path[0]) write_prof();
    prof_path[0] = 0;
    return result_of("aclprofFinalize");
}
API void *aclprofCreateConfig(uint32_t *ids, uint32_t count, int metrics, void *events, uint64_t data) {
    (void)events;
    note("aclprofCreateConfig(device %u of %u, metrics %d, data 0x%llx)", count ? ids[0] : 0, count, metrics,
         (unsigned long long)data);
    return (void *)0x3000;
}
API int aclprofDestroyConfig(void *config) { (void)config; return 0; }
API int aclprofSetConfig(int kind, const char *value, size_t size) {
    note("aclprofSetConfig(%d, %.*s)", kind, (int)size, value);
    return 0;
}
API int aclprofWarmup(void *config) { (void)config; note("aclprofWarmup"); return 0; }
API int aclprofStart(void *config) {
    (void)config;
    start_wall = ns(CLOCK_REALTIME);
    start_raw = ns(CLOCK_MONOTONIC_RAW);
    note("aclprofStart");
    int result = result_of("aclprofStart");
    if (result) prof_path[0] = 0;
    return result;
}
API int aclprofStop(void *config) { (void)config; note("aclprofStop"); return result_of("aclprofStop"); }
API void *aclprofCreateStepInfo(void) { return (void *)0x4000; }
API int aclprofGetStepTimestamp(void *info, int tag, void *stream) { (void)info; (void)tag; (void)stream; return 0; }
API void aclprofDestroyStepInfo(void *info) { (void)info; }
API int aclprofMarkEx(const char *text, size_t size, void *stream) { (void)text; (void)size; (void)stream; return 0; }
API int aclprofGetSupportedFeatures(size_t *size, void **data) { *size = 0; *data = 0; return 1; }
API int aclprofGetSupportedFeaturesV2(size_t *size, void **data) { *size = 0; *data = 0; return 1; }
JUST_NOTED(aclprofRegisterDeviceCallback)

/* The driver (libascend_hal): version 0 is too old for its own clock, so the host's is used */

API int halGetAPIVersion(int *version) { *version = 0; return 0; }
API int halGetDeviceInfo(uint32_t id, int32_t module, int32_t kind, int64_t *value) {
    (void)id; (void)module; (void)kind; *value = 0; return 1;
}

/* MSPTI (libmspti), which torch.profiler's PrivateUse1 goes through: it hands out no record */

API int msptiSubscribe(void **subscriber, void *callback, void *user) {
    (void)callback; (void)user;
    *subscriber = (void *)0x5000;
    note("msptiSubscribe");
    return 0;
}
API int msptiActivityEnable(int kind) { note("msptiActivityEnable(%d)", kind); return 0; }
API int msptiActivityDisable(int kind) { (void)kind; return 0; }
API int msptiActivityGetNextRecord(void *buffer, size_t size, void **record) {
    (void)buffer; (void)size;
    *record = 0;
    return 2;
}
API int msptiActivityPushExternalCorrelationId(int kind, uint64_t id) { (void)kind; (void)id; return 0; }
API int msptiActivityPopExternalCorrelationId(int kind, uint64_t *id) { (void)kind; if (id) *id = 0; return 0; }
JUST_NOTED(msptiActivityRegisterCallbacks)
JUST_NOTED(msptiActivityFlushAll)
JUST_NOTED(msptiUnsubscribe)
